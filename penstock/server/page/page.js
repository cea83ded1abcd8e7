// A chat with the model that this server has. The conversation is in this page only.

const find = (id) => document.getElementById(id);
const form = find("form"), prompt = find("prompt"), messages = find("messages");
let model = "", conversation = [], running = null;

function headers() {
  const key = find("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function failure(response) {
  const content = await response.json().catch(() => null);
  const error = new Error(content?.error?.message ?? `The server answered with status ${response.status}.`);
  error.code = content?.error?.code;
  return error;
}

async function findModel() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) throw await failure(response);
  model = (await response.json()).data[0].id;
  find("model").textContent = model;
}

function show(role, text) {
  const article = document.createElement("article"), title = document.createElement("h2"), body = document.createElement("p");
  article.className = role;
  title.textContent = role === "user" ? "You" : "Model";
  body.textContent = text;
  article.append(title, body);
  find("empty").hidden = true;
  messages.append(article);
  messages.scrollTop = messages.scrollHeight;
  return body;
}

function complain(text) {
  find("error").textContent = text;
  find("error").hidden = !text;
}

function request(text) {
  const body = { model, stream: true, stream_options: { include_usage: true } };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    const value = find(name).value;
    if (value !== "") body[name] = Number(value);
  }
  if (find("mode").value === "text") return ["v1/completions", { ...body, prompt: text }];
  const system = find("system").value.trim();
  return ["v1/chat/completions", { ...body, messages: [...(system ? [{ role: "system", content: system }] : []), ...conversation] }];
}

// The objects of a stream of server-sent events, until [DONE].
async function* events(response) {
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

async function answer(text, place) {
  const [path, body] = request(text);
  const response = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal });
  if (!response.ok) throw await failure(response);
  let begin = null, reason = null;
  for await (const piece of events(response)) {
    const choice = piece.choices[0];
    if (piece.usage) {
      const seconds = (performance.now() - begin) / 1000, count = piece.usage.completion_tokens;
      find("speed").textContent = `${count} tokens, ${(Math.max(count - 1, 0) / seconds).toFixed(1)} a second`;
    }
    if (!choice) continue;
    begin ??= performance.now();
    reason = choice.finish_reason ?? reason;
    const atEnd = messages.scrollHeight - messages.scrollTop - messages.clientHeight < 40;
    place.append(choice.delta?.content ?? choice.text ?? "");
    if (atEnd) messages.scrollTop = messages.scrollHeight;
  }
  return reason;
}

function busy(on) {
  find("send").disabled = find("clear").disabled = on;
  find("stop").disabled = !on;
  messages.setAttribute("aria-busy", String(on));
}

async function send() {
  const text = prompt.value;
  if (running || !text.trim()) return;
  if (!form.checkValidity()) document.querySelector("details").open = true; // where the wrong field is
  if (!form.reportValidity()) return;
  running = new AbortController();
  complain("");
  busy(true);
  find("status").textContent = "The model answers.";
  conversation.push({ role: "user", content: text });
  show("user", text);
  prompt.value = "";
  const place = show("assistant", "");
  let end = "";
  try {
    if (!model) await findModel();
    const reason = await answer(text, place);
    end = reason === "length" ? "The answer was cut at its number of tokens." : "The answer is complete.";
  } catch (error) {
    end = running.signal.aborted ? "The answer was stopped." : "";
    if (!running.signal.aborted) complain(error.message);
    if (error.code === "no_chat_template") find("mode").value = "text";
  }
  place.normalize();
  if (place.textContent) {
    conversation.push({ role: "assistant", content: place.textContent });
  } else { // nothing was answered: the message can be sent again
    conversation.pop();
    place.parentElement.previousElementSibling.remove();
    place.parentElement.remove();
    prompt.value = prompt.value || text;
  }
  find("status").textContent = end;
  find("spoken").textContent = place.textContent; // read once, when it is whole
  running = null;
  busy(false);
  prompt.focus();
}

form.addEventListener("submit", (event) => { event.preventDefault(); send(); });
find("stop").addEventListener("click", () => running?.abort());
find("clear").addEventListener("click", () => {
  conversation = [];
  messages.querySelectorAll("article").forEach((one) => one.remove());
  find("empty").hidden = false;
  for (const id of ["status", "spoken", "speed"]) find(id).textContent = "";
  complain("");
  prompt.focus();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
findModel().catch((error) => { find("status").textContent = error.message; });
