// Vercel's AI SDK, versions 6 and 7, with four providers: two turns with a tool each, the first whole and the second
// streamed. The provider of `openai` refers to earlier items of stored responses by their ids.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import * as ai from "ai";

const baseURL = process.env.BASE_URL;
const QUESTIONS = ["How warm is it in Rome?", "And in Milan?"];
const ANSWER = "It is 21 degrees in Rome.";
// Version 7 has another name for it.
const stepCountIs = ai.stepCountIs ?? ai.isStepCount;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "alignedserve", baseURL });
const anthropic = createAnthropic({ baseURL, apiKey: "none" });
const tools = {
  weather: ai.tool({
    inputSchema: ai.jsonSchema({ type: "object", properties: { city: { type: "string" } }, required: ["city"] }),
    execute: async ({ city }) => {
      assert.equal(city, "Rome");
      return "21 degrees";
    },
  }),
};

for (const model of [openai("demo"), openai.chat("demo"), compatible("demo"), anthropic("demo")]) {
  const asked = { model, tools, stopWhen: stepCountIs(2), maxRetries: 0 };
  const messages = [{ role: "user", content: QUESTIONS[0] }];
  const first = await ai.generateText({ ...asked, messages });
  assert.equal(first.text, ANSWER);
  // Version 7 has only those of the last step in its response.
  const said = first.responseMessages ?? first.response.messages;
  messages.push(...said, { role: "user", content: QUESTIONS[1] });
  let failure;
  const second = ai.streamText({ ...asked, messages, onError: ({ error }) => (failure = error) });
  let text = "";
  for await (const piece of second.textStream) text += piece;
  if (failure) throw failure;
  assert.equal(text, ANSWER);
}
