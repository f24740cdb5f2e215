// Holds a conversation with the npm packages `ai` and `@ai-sdk/openai-compatible`, streamed, for run.py: it reads
// {baseURL, apiKey, questions} as JSON from standard input and writes {completions} as JSON to standard output.

import { text } from "node:stream/consumers";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { streamText } from "ai";

const { baseURL, apiKey, questions } = JSON.parse(await text(process.stdin));
const provider = createOpenAICompatible({ name: "adriaticum", baseURL, apiKey, includeUsage: true });

const messages = [];
const completions = [];
for (const question of questions) {
  messages.push({ role: "user", content: question });
  const result = streamText({ model: provider("adriaticum"), messages });
  let content = "";
  for await (const part of result.textStream) content += part;
  const [{ id }, { totalTokens }] = [await result.response, await result.totalUsage];
  messages.push({ role: "assistant", content });
  completions.push({ text: content, id, total: totalTokens });
}
console.log(JSON.stringify({ completions }));
