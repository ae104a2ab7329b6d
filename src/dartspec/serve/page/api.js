// The server's two addresses: what it is, and an answer as it is written.

export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

let key = null; // asked for when the server wants one, and forgotten with the tab

export function setKey(value) {
  key = value;
}

function headers() {
  return key ? { "Content-Type": "application/json", Authorization: `Bearer ${key}` } : { "Content-Type": "application/json" };
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers() });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  let message = `The server answered with status ${response.status}.`;
  try {
    message = (await response.json()).error.message || message;
  } catch {
    // no JSON: the status has to do
  }
  const wait = response.headers.get("Retry-After");
  throw new ServerError(wait ? `${message.replace(/\.?$/, ".")} Try again in ${wait} s.` : message, response.status);
}

/** Model, drafters, limits, and plain decoding's speed. */
export async function getInfo() {
  return (await request("/dartspec/info")).json();
}

/** The chunks of one answer. Ends normally only where the server said that it is complete. */
export async function* stream(body, signal) {
  const response = await request("/v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message);
    yield chunk;
  }
  throw new ServerError("The connection ended before the answer did.");
}

/** The `data:` of each server-sent event. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    while (true) {
      const { value, done } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        throw new ServerError("The connection to the server was lost.");
      });
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines.map((text) => text.replace(/\r$/, ""))) {
        if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
        else if (!line && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // the server then frees its slot
  }
}
