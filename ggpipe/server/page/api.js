// Requests to the server of this page, and its event streams.

const KEY = "ggpipe.key";

export const apiKey = {
  get: () => localStorage.getItem(KEY) ?? "",
  set: (key) => (key ? localStorage.setItem(KEY, key) : localStorage.removeItem(KEY)),
};

/** A response that is an error object, or cannot be read. */
export class ApiError extends Error {
  constructor(status, message, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }

  static of(object, status) {
    const error = object?.error ?? {};
    return new ApiError(error.code ?? status, error.message ?? `the server answered with ${status}`, error.param ?? null);
  }
}

/** A successful response. Throws ApiError, or TypeError if the server is unreachable. */
export async function ask(path, { body, signal } = {}) {
  const headers = {};
  const key = apiKey.get();
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    cache: "no-store",
    credentials: "same-origin",
  });
  if (response.ok) return response;
  let object = null;
  try {
    object = await response.json();
  } catch { /* no JSON: a proxy's own answer */ }
  throw ApiError.of(object, response.status);
}

/** What the server is doing: "ok", "loading", "restarting" or "stopping"; null if it cannot be asked. */
export async function serverStatus() {
  try {
    return (await (await fetch("health", { cache: "no-store" })).json()).status;
  } catch {
    return null;
  }
}

/** A stream: `{data}` for each event, `{}` for each comment. Throws the same errors as `fetch` when it breaks. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      held += value;
      const lines = held.split(/\r\n|\n|\r(?!$)/);
      held = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield { data: data.join("\n") };
          data = [];
        } else if (line.startsWith(":")) yield {};
        else if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
