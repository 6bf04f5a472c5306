// OpenAI's client for Node: two turns with a tool each, by runTools and through responses.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none" });
const QUESTIONS = ["How warm is it in Rome?", "And in Milan?"];
const ANSWER = "It is 21 degrees in Rome.";
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };

let messages = [];
for (const content of QUESTIONS) {
  const runner = client.chat.completions.runTools({
    model: "demo",
    messages: [...messages, { role: "user", content }],
    tools: [{ type: "function", function: { name: "weather", parse: JSON.parse, parameters, function: () => "21 degrees" } }],
  });
  assert.equal(await runner.finalContent(), ANSWER);
  messages = runner.messages;
}

const tools = [{ type: "function", name: "weather", parameters, strict: false }];
let last;
for (const input of QUESTIONS) {
  const asked = await client.responses.create({ model: "demo", input, tools, previous_response_id: last?.id });
  const call = asked.output.find((item) => item.type === "function_call");
  const result = { type: "function_call_output", call_id: call.call_id, output: "21 degrees" };
  last = await client.responses.create({ model: "demo", input: [result], tools, previous_response_id: asked.id });
  assert.equal(last.output_text, ANSWER);
}
