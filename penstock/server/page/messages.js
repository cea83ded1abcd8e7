// Messages as elements of the page.

import { Growing } from "./markdown.js";

const messages = document.getElementById("messages");

function made(tag, className, text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}

function insert(article) {
  document.getElementById("empty").hidden = true;
  messages.insertBefore(article, document.getElementById("key-form"));
  messages.scrollTop = messages.scrollHeight;
}

export function showQuestion(text) {
  const article = made("article", "user");
  article.append(made("h2", "", "You"), made("p", "text", text));
  insert(article);
}

// An answer that grows by the deltas of a stream.
export class Answer {
  constructor() {
    this.article = made("article", "assistant");
    this.article.setAttribute("aria-label", "Answer");
    this.body = made("div", "markdown");
    this.text = new Growing(this.body);
    this.text.after = () => this.follow();
    this.reasoning = "";
    this.calls = [];
    this.atEnd = true;
    this.article.append(made("h2", "", "Model"), this.body);
    insert(this.article);
  }

  // To the end of the conversation, unless somebody scrolled up.
  follow() {
    if (this.atEnd) messages.scrollTop = messages.scrollHeight;
  }

  fold(className, title) {
    const details = made("details", className), content = made("pre", "");
    content.tabIndex = 0;
    details.append(made("summary", "", title), content);
    this.article.insertBefore(details, className === "reasoning" ? this.body : null);
    return details;
  }

  add(delta) {
    this.atEnd = messages.scrollHeight - messages.scrollTop - messages.clientHeight < 40;
    if (delta.reasoning_content) {
      this.thoughts ??= this.fold("reasoning", "Reasoning");
      this.reasoning += delta.reasoning_content;
      this.thoughts.lastChild.append(delta.reasoning_content);
    }
    for (const one of delta.tool_calls ?? []) this.addCall(one);
    if (delta.content) this.text.add(delta.content);
    this.follow();
  }

  addCall(piece) {
    const call = this.calls[piece.index] ??= {
      id: piece.id, type: "function", function: { name: "", arguments: "" }, shown: this.fold("call", "Tool call"),
    };
    call.function.name += piece.function?.name ?? "";
    call.function.arguments += piece.function?.arguments ?? "";
    call.shown.firstChild.textContent = `Tool call: ${call.function.name}`;
    call.shown.lastChild.append(piece.function?.arguments ?? "");
  }

  get empty() {
    return !this.text.text && !this.reasoning && !this.calls.length;
  }

  finish() {
    this.text.finish();
    for (const pre of this.article.querySelectorAll("details pre")) pre.normalize();
    if (!this.text.text) return;
    const copy = made("button", "copy", "Copy the answer");
    copy.type = "button";
    copy.dataset.copy = "answer";
    copy.source = this.text.text;
    this.article.append(copy);
    this.follow();
  }

  // For the server and for storage.
  message() {
    const calls = this.calls.map(({ shown, ...call }) => call);
    return {
      role: "assistant", content: this.text.text,
      ...(this.reasoning ? { reasoning_content: this.reasoning } : {}), ...(calls.length ? { tool_calls: calls } : {}),
    };
  }
}

export function showMessage(message) {
  if (message.role === "user") return showQuestion(message.content);
  const answer = new Answer(), calls = (message.tool_calls ?? []).map((call, index) => ({ ...call, index }));
  answer.add({ ...message, tool_calls: calls });
  answer.finish();
}

async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = document.createElement("textarea"); // a page without TLS has no clipboard
  field.value = text;
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  if (!copied) throw new Error("The browser does not copy.");
}

messages.addEventListener("click", async ({ target }) => {
  if (!target.dataset?.copy) return;
  const before = target.before ??= target.textContent;
  const text = target.dataset.copy === "code" ? target.closest(".code").querySelector("code").textContent : target.source;
  target.textContent = await copyText(text).then(() => "Copied", () => "Not copied");
  target.focus();
  document.getElementById("status").textContent = `${target.textContent}.`;
  setTimeout(() => { target.textContent = before; }, 1500);
});
