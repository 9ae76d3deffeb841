// Markdown as DOM nodes, from the tokens of marked (see marked.js). All text becomes text nodes: nothing that a model
// writes is ever read as HTML.
//
// CommonMark's blocks and GitHub's tables, task lists and strikethrough. HTML is text. Line ends inside a paragraph are
// kept, images are links, and only http, https and mailto are followed.

import { Marked } from "./marked.js";
import { copyText, h, iconButton } from "./dom.js";

const marked = new Marked({ gfm: true, breaks: true, tokenizer: { html() {}, tag() {}, def() {} } });
const DEEPEST = 40; // tokens in tokens; deeper ones are text
const ENTITY = /&(?:#\d{1,7}|#x[\da-f]{1,6}|[a-z]\w{1,31});/gi;

/** Shows text that grows. Unchanged blocks keep their nodes. */
export class MarkdownView {
  #blocks = [];

  constructor(place) {
    this.place = place;
  }

  show(text) {
    const tokens = blocks(text);
    let same = 0;
    while (same < tokens.length && this.#blocks[same]?.raw === tokens[same].raw) same += 1;
    for (const old of this.#blocks.splice(same)) old.node.remove();
    for (const token of tokens.slice(same)) {
      const node = token.type === "text" ? h("p", {}, rendered(token)) : rendered(token);
      this.place.append(node);
      this.#blocks.push({ raw: token.raw, node });
    }
  }
}

function blocks(text) {
  try {
    return marked.lexer(text).filter(({ type }) => type !== "space");
  } catch { // nested too deeply
    return [{ type: "text", raw: text, text }];
  }
}

const nodes = (tokens, depth) => tokens.flatMap((token) => rendered(token, depth));

/** The node or nodes of a token. */
function rendered(token, depth = 0) {
  const { type, text, tokens = [] } = token;
  if (depth > DEEPEST) return token.raw;
  const inner = () => nodes(tokens, depth + 1);
  switch (type) {
    case "space":
      return [];
    case "heading": // below the page's own
      return h(`h${Math.min(token.depth + 2, 6)}`, { class: `h${token.depth}` }, inner());
    case "code":
      return code(token);
    case "list":
      return h(
        token.ordered ? "ol" : "ul", token.ordered && token.start !== 1 ? { start: token.start } : {},
        token.items.map((item) => h("li", { class: item.task && "task" }, nodes(item.tokens, depth + 1))),
      );
    case "checkbox":
      return h("input", { type: "checkbox", disabled: true, checked: token.checked });
    case "table":
      return h("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, h(
        "table", {}, h("thead", {}, row("th", token.header)), h("tbody", {}, token.rows.map((own) => row("td", own))),
      ));
    case "paragraph":
    case "blockquote":
    case "strong":
    case "em":
    case "del":
      return h({ paragraph: "p" }[type] ?? type, {}, inner());
    case "hr":
    case "br":
      return h(type);
    case "codespan":
      return h("code", {}, text);
    case "link":
      return anchor(token.href, inner());
    case "image":
      return anchor(token.href, [text]);
    case "text":
      return tokens.length ? inner() : decoded(text);
    default:
      return text;
  }
}

const row = (tag, cells) => h("tr", {}, cells.map(({ align, tokens }) => h(tag, { class: align ?? false }, nodes(tokens, 1))));

function code({ lang, text }) {
  const button = iconButton("copy", "Copy the code", () => copyText(text, button));
  return h(
    "figure", { class: "code" },
    h("figcaption", {}, h("span", {}, lang?.match(/^\S*/)[0]), button),
    h("pre", { tabindex: "0" }, h("code", {}, text)),
  );
}

const decoded = (text) => text.replace(ENTITY, (entity) => new DOMParser().parseFromString(entity, "text/html").documentElement.textContent);

function anchor(target, children) {
  let url = null;
  try {
    url = new URL(decoded(target));
  } catch { /* a relative address leads nowhere here */ }
  if (!url || !["http:", "https:", "mailto:"].includes(url.protocol)) return h("span", { title: target }, children);
  return h("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
}
