// Calls to the server. Keys are read from the form at each call and stored nowhere else.

import { find } from "./dom.js";

export class ApiError extends Error {}

function headers(key) {
  const token = find(key).value.trim();
  return token ? { Authorization: `Bearer ${token}` } : {};
}

/** The error message of an answer in OpenAI's shape, or its text. */
async function problem(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `HTTP ${response.status} ${text.slice(0, 300)}`;
  }
}

async function send(path, options) {
  const response = await fetch(path, { credentials: "omit", cache: "no-store", ...options });
  if (!response.ok) throw new ApiError(await problem(response));
  return response;
}

export async function get(path) {
  return (await send(path, { headers: headers("api-key") })).json();
}

export async function postAdmin(path, body) {
  return (await send(path, post(body, "admin-key"))).text();
}

/** Parsed `data:` events of a streaming answer, until [DONE]. */
export async function* stream(path, body, signal) {
  const response = await send(path, { ...post({ ...body, stream: true }, "api-key"), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function post(body, key) {
  return {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers(key) },
    body: JSON.stringify(body),
  };
}
