// What the page asks of the server, and what can go wrong on the way.

export class Failure extends Error {
  /** status 0: the server did not answer at all. */
  constructor(message, { status = 0, code = null, retryAfterS = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfterS = retryAfterS;
  }
}

export class Client {
  constructor(readKey) {
    this.readKey = readKey;
  }

  async get(path) {
    const response = await this.#send(path, { headers: this.#headers() });
    return response.json();
  }

  /** The chunks of a streamed chat, as they arrive. */
  async *chat(body, signal) {
    const response = await this.#send("/v1/chat/completions", {
      method: "POST",
      headers: { ...this.#headers(), "content-type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
    for await (const text of events(response.body)) {
      if (text === "[DONE]") return;
      const chunk = JSON.parse(text);
      if (chunk.error) throw new Failure(chunk.error.message, { status: 503, code: chunk.error.code });
      yield chunk;
    }
    throw new Failure("The server stopped in the middle of the answer.");
  }

  #headers() {
    const key = this.readKey();
    return key ? { authorization: `Bearer ${key}` } : {};
  }

  async #send(path, options) {
    let response;
    try {
      response = await fetch(path, { cache: "no-store", ...options });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Failure("The server does not answer.");
    }
    if (!response.ok) throw await failureOf(response);
    return response;
  }
}

async function failureOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // A proxy in between may answer with anything.
  }
  const wait = Number.parseInt(response.headers.get("retry-after") ?? "", 10);
  return new Failure(error.message ?? `The server answered ${response.status}.`, {
    status: response.status,
    code: error.code ?? null,
    retryAfterS: Number.isNaN(wait) ? null : wait,
  });
}

/** Data of server-sent events; comments that only keep the connection open are dropped. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      held += value;
      const whole = held.split("\n\n");
      held = whole.pop();
      for (const event of whole) {
        if (event.startsWith("data: ")) yield event.slice(6);
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The connection broke in the middle of the answer.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
