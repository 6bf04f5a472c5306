// Vercel's AI SDK, with its provider for compatible servers (chats) and OpenAI's own (responses).
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";

const baseURL = process.env.BASE_URL;
const compatible = createOpenAICompatible({
  name: "alignedserve",
  baseURL,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL, apiKey: "none" });
const prompt = "Count from 7 to 9.";
const ANSWER = "7, 8, 9";
const city = jsonSchema({
  type: "object",
  properties: { city: { type: "string", enum: ["Rome", "Oslo"] } },
  required: ["city"],
  additionalProperties: false,
});

for (const model of [compatible("demo"), openai("demo")]) {
  assert.equal((await generateText({ model, prompt, temperature: 0 })).text, ANSWER);

  const streamed = streamText({ model, prompt, temperature: 0 });
  let text = "";
  for await (const piece of streamed.textStream) text += piece;
  assert.equal(text, ANSWER);
  assert.ok((await streamed.usage).outputTokens > 0);

  const { output } = await generateText({ model, prompt, temperature: 0, output: Output.object({ schema: city }) });
  assert.ok(["Rome", "Oslo"].includes(output.city));

  // the second step is asked with the function's result
  const { steps } = await generateText({
    model,
    prompt,
    temperature: 0,
    stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? { type: "tool", toolName: "weather" } : "none" }),
    tools: { weather: tool({ inputSchema: city, execute: async () => "Count from 7 to 9." }) },
  });
  assert.equal(steps[0].toolCalls[0].toolName, "weather");
  assert.ok(["Rome", "Oslo"].includes(steps[0].toolCalls[0].input.city));
  assert.ok(steps[1].text.length > 0);
}
