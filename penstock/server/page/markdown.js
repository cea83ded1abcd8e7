// Markdown of answers. HTML in it is text, links have few schemes, and there are no images.

import MarkdownIt from "./markdown-it.esm.min.mjs";

const markdown = new MarkdownIt({ html: false, linkify: true, breaks: true });
const { escapeHtml } = markdown.utils;
markdown.disable("image");
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
markdown.validateLink = (link) => /^(https?|mailto):/i.test(link.trim());

function code(text, language) {
  const copy = '<button type="button" data-copy="code" aria-label="Copy the code">Copy</button>';
  return `<div class="code"><div class="bar"><span>${escapeHtml(language)}</span>${copy}</div>`
    + `<pre tabindex="0"><code>${escapeHtml(text)}</code></pre></div>\n`;
}

const rules = markdown.renderer.rules;
const plain = (tokens, index, options, env, self) => self.renderToken(tokens, index, options);
rules.fence = (tokens, index) => code(tokens[index].content, tokens[index].info.trim().split(/\s+/)[0]);
rules.code_block = (tokens, index) => code(tokens[index].content, "");
rules.link_open = (tokens, index, ...rest) => {
  tokens[index].attrSet("target", "_blank");
  tokens[index].attrSet("rel", "noopener noreferrer");
  return plain(tokens, index, ...rest);
};
rules.table_open = () => '<div class="table" tabindex="0"><table>\n';
rules.table_close = () => "</table></div>\n";
for (const name of ["th_open", "td_open"]) {
  rules[name] = (tokens, index, ...rest) => { // the policy of the page forbids style attributes
    const style = tokens[index].attrGet("style");
    if (style) tokens[index].attrs = [["class", style.replace("text-align:", "")]];
    return plain(tokens, index, ...rest);
  };
}

function nodes(html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  return template.content;
}

// A text that grows, shown in an element. Blocks before the last one cannot change any more, so they are rendered once. One
// rendering takes at most a fifth of the time, whatever the size of the last block is.
export class Growing {
  constructor(place) {
    this.place = place;
    this.text = "";
    this.settled = 0; // so many characters are in nodes that stay
    this.kept = 0; // the number of these nodes
    this.env = {}; // link definitions
    this.timer = null;
    this.after = () => {};
  }

  add(piece) {
    this.text += piece;
    this.timer ??= setTimeout(() => this.draw(), this.pause ?? 30);
  }

  draw() {
    this.timer = null;
    const begin = performance.now(), rest = this.text.slice(this.settled);
    const tokens = markdown.parse(rest, this.env);
    const last = tokens.findLastIndex((one) => one.level === 0 && one.nesting >= 0 && one.map);
    while (this.place.childNodes.length > this.kept) this.place.lastChild.remove();
    if (last > 0) {
      this.place.append(nodes(markdown.renderer.render(tokens.slice(0, last), markdown.options, this.env)));
      this.kept = this.place.childNodes.length;
      for (let line = tokens[last].map[0]; line > 0; line--) this.settled = this.text.indexOf("\n", this.settled) + 1;
    }
    this.place.append(nodes(markdown.renderer.render(tokens.slice(Math.max(last, 0)), markdown.options, this.env)));
    this.pause = Math.max(30, 4 * (performance.now() - begin));
    this.after();
  }

  // All at once: a link may be defined behind its use.
  finish() {
    clearTimeout(this.timer);
    const whole = document.createElement("div");
    whole.append(nodes(markdown.render(this.text)));
    this.place.normalize();
    if (whole.innerHTML !== this.place.innerHTML) this.place.replaceChildren(...whole.childNodes);
    this.after();
  }
}
