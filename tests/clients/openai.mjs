// Holds a conversation with the npm package `openai`, for run.py: it reads {baseURL, apiKey, messages, questions,
// options} as JSON from standard input and writes {completions} or {error} as JSON to standard output.

import { text } from "node:stream/consumers";
import OpenAI, { APIError } from "openai";

const { baseURL, apiKey, messages, questions, options } = JSON.parse(await text(process.stdin));
const client = new OpenAI({ baseURL, apiKey });

async function converse() {
  const completions = [];
  for (const question of questions) {
    messages.push({ role: "user", content: question });
    const answer = await client.chat.completions.create({ model: "adriaticum", messages, ...options });
    const completion = options.stream ? await whole(answer) : answer;
    messages.push(completion.choices[0].message);
    completions.push({ text: completion.choices[0].message.content, id: completion._request_id });
  }
  return { completions };
}

// A streamed completion.
async function whole(stream) {
  let [content, id] = ["", ""];
  for await (const chunk of stream) {
    id = chunk.id;
    content += chunk.choices[0]?.delta.content ?? "";
  }
  return { choices: [{ message: { role: "assistant", content } }], _request_id: id };
}

function reported(error) {
  // Any other error is a fault of this file, and ends it.
  if (!(error instanceof APIError)) throw error;
  const { status, code, requestID, message } = error;
  return { error: { kind: `OpenAI.${error.constructor.name}`, status, code, request_id: requestID, message } };
}

console.log(JSON.stringify(await converse().catch(reported)));
