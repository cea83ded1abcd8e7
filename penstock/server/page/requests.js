// Requests to this server. A request without a right key asks for it, and is sent again.

let key = "", asking = null; // the key is nowhere but here

// The promise of a key that somebody enters into a form of the conversation.
function askKey(message) {
  asking ??= new Promise((resolve) => {
    const form = document.getElementById("key-form"), field = document.getElementById("key");
    document.getElementById("key-reason").textContent = message;
    form.hidden = false;
    form.scrollIntoView({ block: "end" });
    field.focus();
    form.onsubmit = (event) => {
      event.preventDefault();
      key = field.value.trim();
      field.value = "";
      form.hidden = true;
      asking = null;
      resolve();
    };
  });
  return asking;
}

function aborted(signal) {
  return new Promise((_, reject) => signal?.addEventListener("abort", () => reject(signal.reason)));
}

async function failure(response) {
  const content = await response.json().catch(() => null);
  const error = new Error(content?.error?.message ?? `The server answered with status ${response.status}.`);
  error.code = content?.error?.code;
  return error;
}

export async function send(path, signal, body) {
  const options = body === undefined ? { signal } : { method: "POST", body: JSON.stringify(body), signal };
  while (true) {
    const used = key, headers = { "Content-Type": "application/json", ...(used ? { Authorization: `Bearer ${used}` } : {}) };
    const response = await fetch(path, { ...options, headers }).catch((error) => {
      throw error instanceof TypeError ? new Error("The server cannot be reached. Is it running?") : error;
    });
    if (response.ok) return response;
    if (response.status !== 401) throw await failure(response);
    if (used !== key) continue; // somebody entered it meanwhile
    await Promise.race([askKey(used ? "The server does not know this API key." : "The server asks for an API key."), aborted(signal)]);
  }
}

// The objects of a stream of server-sent events, until [DONE].
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The connection ended before the answer did.");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const piece = JSON.parse(data);
      if (piece.error) throw new Error(piece.error.message);
      yield piece;
    }
  }
}
