// A chat with a model of this server.

import { Answer, showMessage, showQuestion } from "./messages.js";
import { events, send as request } from "./requests.js";
import { load, store } from "./stored.js";

const find = (id) => document.getElementById(id);
const form = find("form"), prompt = find("prompt"), messages = find("messages"), settings = find("settings");
const FIELDS = ["model", "mode", "temperature", "top_p", "max_tokens", "seed", "system"];
let { conversation, fields } = load(), running = null, models = null;

function findModels() {
  models ??= request("v1/models").then(async (response) => {
    const names = (await response.json()).data.map((one) => one.id);
    find("model").replaceChildren(...names.map((name) => new Option(name, name)));
    if (names.includes(fields.model)) find("model").value = fields.model;
  }).catch((error) => { models = null; throw error; });
  return models;
}

function complain(text) {
  find("error").textContent = text;
  find("error").hidden = !text;
}

function keep() {
  fields = Object.fromEntries(FIELDS.map((id) => [id, find(id).value || (id === "model" ? fields.model ?? "" : "")]));
  const problem = store(conversation, fields);
  if (problem) find("status").textContent = problem;
}

function asked(text) {
  const body = { model: find("model").value, stream: true, stream_options: { include_usage: true } };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    const value = find(name).value;
    if (value !== "") body[name] = Number(value);
  }
  if (find("mode").value === "text") return ["v1/completions", { ...body, prompt: text }];
  const system = find("system").value.trim();
  return ["v1/chat/completions", { ...body, messages: [...(system ? [{ role: "system", content: system }] : []), ...conversation] }];
}

async function fill(answer, text) {
  const response = await request(asked(text)[0], running.signal, asked(text)[1]);
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
    answer.add(choice.delta ?? { content: choice.text });
  }
  return reason;
}

function busy(on) {
  find("send").hidden = find("clear").disabled = on;
  find("stop").hidden = !on;
  messages.setAttribute("aria-busy", String(on));
}

function openSettings(open) {
  settings.hidden = !open;
  find("toggle").setAttribute("aria-expanded", String(open));
}

function valid() {
  const wrong = settings.querySelector(":invalid");
  if (wrong) openSettings(true); // it cannot be told at a field that is hidden
  return wrong ? wrong.reportValidity() : form.reportValidity();
}

async function send() {
  const text = prompt.value;
  if (running || !text.trim() || !valid()) return;
  running = new AbortController();
  complain("");
  busy(true);
  find("status").textContent = "The model answers.";
  conversation.push({ role: "user", content: text });
  showQuestion(text);
  prompt.value = "";
  const answer = new Answer();
  let end = "";
  try {
    await Promise.race([findModels(), new Promise((_, no) => running.signal.addEventListener("abort", () => no(running.signal.reason)))]);
    const reason = await fill(answer, text);
    end = reason === "length" ? "The answer was cut at its number of tokens." : "The answer is complete.";
  } catch (error) {
    end = running.signal.aborted ? "The answer was stopped." : "";
    if (!running.signal.aborted) complain(error.message);
    if (error.code === "no_chat_template") find("mode").value = "text";
  }
  finish(answer, text, end);
}

function finish(answer, text, end) {
  if (answer.empty) { // the message can be sent again
    conversation.pop();
    answer.article.previousElementSibling.remove();
    answer.article.remove();
    find("empty").hidden = conversation.length > 0;
    prompt.value = prompt.value || text;
  } else {
    answer.finish();
    conversation.push(answer.message());
  }
  find("status").textContent = end;
  find("spoken").textContent = answer.body.textContent; // read once, when it is whole
  keep();
  running = null;
  busy(false);
  prompt.focus();
}

form.addEventListener("submit", (event) => { event.preventDefault(); send(); });
find("stop").addEventListener("click", () => running?.abort());
find("toggle").addEventListener("click", () => openSettings(settings.hidden));
find("clear").addEventListener("click", () => {
  conversation = [];
  messages.querySelectorAll("article").forEach((one) => one.remove());
  find("empty").hidden = false;
  for (const id of ["status", "spoken", "speed"]) find(id).textContent = "";
  complain("");
  keep();
  prompt.focus();
});
for (const id of FIELDS) find(id).addEventListener("change", keep);
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (running) running.abort();
  else if (!settings.hidden) { openSettings(false); find("toggle").focus(); }
});

for (const id of FIELDS) if (id !== "model" && id in fields) find(id).value = fields[id];
conversation.forEach(showMessage);
findModels().catch((error) => complain(error.message));
