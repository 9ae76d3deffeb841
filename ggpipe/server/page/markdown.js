// Markdown as DOM nodes. All text becomes text nodes: nothing that a model writes is ever read as HTML.
//
// CommonMark's blocks and GitHub's tables, task lists and strikethrough, as far as models write them. Line ends inside a
// paragraph are kept, images are links, and only http, https and mailto are followed.

import { copyText, h, iconButton } from "./dom.js";

const DEEPEST = 12; // nested lists and quotes; deeper ones are text
const LONGEST = 2000; // a link's label or address
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:( {1,4})(?=\S)|[ \t]+|$)/;
const DIVIDER = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

/** Shows a text that grows. Blocks that stay as they are keep their nodes. */
export class MarkdownView {
  #blocks = [];

  constructor(place) {
    this.place = place;
  }

  show(text) {
    const sources = blocks(text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"));
    let same = 0;
    while (same < sources.length && this.#blocks[same]?.source === sources[same].source) same += 1;
    for (const old of this.#blocks.splice(same)) old.node.remove();
    for (const block of sources.slice(same)) {
      const node = rendered(block, 0);
      this.place.append(node);
      this.#blocks.push({ source: block.source, node });
    }
  }
}

/** The blocks of lines: `{kind, lines, source, …}`. */
function blocks(lines) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const block = blockAt(lines, at);
    block.source = `${block.kind}\n${lines.slice(at, block.end).join("\n")}`;
    found.push(block);
    at = block.end;
  }
  return found;
}

function blockAt(lines, at) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return fenced(lines, at, fence);
  if (/^ {4}/.test(line)) return indented(lines, at);
  const heading = HEADING.exec(line);
  if (heading) return { kind: "heading", level: heading[1].length, text: heading[2] ?? "", end: at + 1 };
  if (RULE.test(line)) return { kind: "rule", end: at + 1 };
  if (QUOTE.test(line)) return quote(lines, at);
  if (ITEM.test(line)) return list(lines, at);
  if (isTable(lines, at)) return table(lines, at);
  let end = at + 1;
  while (end < lines.length && !endsParagraph(lines, end)) end += 1;
  return { kind: "paragraph", text: lines.slice(at, end).map((one) => one.trim()).join("\n"), end };
}

function endsParagraph(lines, at) {
  const line = lines[at];
  const item = ITEM.exec(line);
  return !line.trim() || FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)
    || (item && item[0].trim() !== line.trim()) || isTable(lines, at);
}

function fenced(lines, at, [, mark, language]) {
  const close = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}[ \\t]*$`);
  const indent = lines[at].search(/\S/);
  let end = at + 1;
  while (end < lines.length && !close.test(lines[end])) end += 1;
  const inner = lines.slice(at + 1, end).map((line) => line.replace(new RegExp(`^ {0,${indent}}`), ""));
  return { kind: "code", language, text: inner.join("\n"), end: Math.min(end + 1, lines.length) };
}

function indented(lines, at) {
  let end = at;
  while (end < lines.length && (/^ {4}/.test(lines[end]) || !lines[end].trim())) end += 1;
  while (!lines[end - 1].trim()) end -= 1;
  return { kind: "code", language: "", text: lines.slice(at, end).map((line) => line.slice(4)).join("\n"), end };
}

function quote(lines, at) {
  let end = at;
  while (end < lines.length && (QUOTE.test(lines[end]) || (lines[end].trim() && !endsParagraph(lines, end)))) end += 1;
  return { kind: "quote", lines: lines.slice(at, end).map((line) => line.replace(QUOTE, "")), end };
}

function list(lines, at) {
  const kindOf = (found) => (/\d/.test(found[2]) ? found[2].at(-1) : found[2]);
  const first = ITEM.exec(lines[at]);
  const items = [];
  let end = at;
  let loose = false;
  while (end < lines.length) {
    const found = ITEM.exec(lines[end]);
    if (!found || kindOf(found) !== kindOf(first) || RULE.test(lines[end])) break;
    const indent = found[1].length + found[2].length + (found[3]?.length ?? 1);
    const own = [lines[end].slice(found[0].length)];
    end += 1;
    while (end < lines.length) {
      const line = lines[end];
      const deep = line.search(/\S/);
      if (deep < 0) own.push("");
      else if (deep >= indent || (deep >= 2 && ITEM.test(line.slice(2)) && deep > found[1].length)) {
        own.push(line.slice(Math.min(deep, indent)));
      } else if (own.at(-1).trim() && !endsParagraph(lines, end)) own.push(line.trim());
      else break;
      end += 1;
    }
    let gap = 0;
    while (own.length > 1 && !own.at(-1).trim()) {
      own.pop();
      gap += 1;
    }
    const next = end < lines.length && ITEM.exec(lines[end]);
    loose ||= (gap > 0 && Boolean(next) && kindOf(next) === kindOf(first)) || hasGap(own);
    items.push(own);
    if (gap && !next) end -= gap;
  }
  return { kind: "list", ordered: /\d/.test(first[2]), start: parseInt(first[2], 10), items, loose, end };
}

/** An empty line in front of a paragraph of an item; those in code do not count. */
function hasGap(lines) {
  let isCode = false;
  return lines.some((line, i) => {
    if (FENCE.test(line)) isCode = !isCode;
    const next = lines[i + 1];
    return !isCode && !line.trim() && /^\S/.test(next ?? "") && !ITEM.test(next) && !FENCE.test(next);
  });
}

const isTable = (lines, at) => lines[at].includes("|") && DIVIDER.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")
  && cells(lines[at]).length === cells(lines[at + 1]).length;

function table(lines, at) {
  const aligns = cells(lines[at + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""));
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && lines[end].trim()) end += 1;
  return { kind: "table", head: cells(lines[at]), aligns, rows: lines.slice(at + 2, end).map(cells), end };
}

/** A row's cells. Bars behind a backslash, or in code, divide nothing. */
function cells(line) {
  const row = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  const found = [""];
  let isCode = false;
  for (let i = 0; i < row.length; i += 1) {
    if (row[i] === "\\" && row[i + 1] === "|") found[found.length - 1] += row[(i += 1)];
    else if (row[i] === "|" && !isCode) found.push("");
    else {
      if (row[i] === "`") isCode = !isCode;
      found[found.length - 1] += row[i];
    }
  }
  return found.map((cell) => cell.trim());
}

// Nodes

function rendered(block, depth) {
  switch (block.kind) {
    case "heading":
      return h(`h${Math.min(block.level + 2, 6)}`, { class: `h${block.level}` }, inline(block.text)); // below the page's own
    case "rule":
      return h("hr");
    case "code":
      return code(block);
    case "quote":
      return h("blockquote", {}, nested(block.lines, depth));
    case "list":
      return h(
        block.ordered ? "ol" : "ul",
        block.ordered && block.start !== 1 ? { start: block.start } : {},
        block.items.map((lines) => item(lines, block.loose, depth)),
      );
    case "table":
      return h("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, h(
        "table", {},
        h("thead", {}, row("th", block.head, block.aligns)),
        h("tbody", {}, block.rows.map((own) => row("td", block.head.map((_, i) => own[i] ?? ""), block.aligns))),
      ));
    default:
      return h("p", {}, inline(block.text));
  }
}

function nested(lines, depth) {
  if (depth >= DEEPEST) return [h("p", {}, lines.join("\n"))];
  return blocks(lines).map((block) => rendered(block, depth + 1));
}

function item(lines, loose, depth) {
  const task = /^\[([ xX])\] /.exec(lines[0]);
  const own = nested(task ? [lines[0].slice(4), ...lines.slice(1)] : lines, depth);
  const children = loose ? own : own.flatMap((node) => (node.tagName === "P" ? [...node.childNodes] : [node]));
  if (!task) return h("li", {}, children);
  return h("li", { class: "task" }, h("input", { type: "checkbox", disabled: true, checked: task[1] !== " " }), children);
}

const row = (tag, texts, aligns) => h("tr", {}, texts.map((text, i) => h(tag, { class: aligns[i] || false }, inline(text))));

function code({ language, text }) {
  const button = iconButton("copy", "Copy the code", () => copyText(text, button));
  return h(
    "figure", { class: "code" },
    h("figcaption", {}, h("span", {}, language), button),
    h("pre", { tabindex: "0" }, h("code", {}, text)),
  );
}

// Inside paragraphs

const TOKEN = new RegExp(
  [
    /\\([!-/:-@[-`{-~])/, // an escape
    /(`+)(?!`)/, // code
    /(!?\[)/, // a link or an image
    /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/, // a link as it is
    /(https?:\/\/[^\s<>"`]{1,2000})/,
    /(\*+|_+|~~+)/, // emphasis
    /(&(?:amp|lt|gt|quot|nbsp|#39);)/,
    /(\n)/,
  ].map((pattern) => pattern.source).join("|"), "g",
);
const ENTITIES = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&nbsp;": "\u00a0", "&#39;": "'" };

/** A line's nodes. */
function inline(text, depth = 0) {
  const parts = []; // nodes, texts, and runs of marks that may begin or end emphasis
  let at = 0;
  const put = (...own) => parts.push(...own);
  const token = new RegExp(TOKEN);
  for (let found = token.exec(text); found; found = token.exec(text)) {
    if (found.index > at) put(text.slice(at, found.index));
    at = token.lastIndex;
    const [whole, escaped, ticks, bracket, angled, bare, marks, entity] = found;
    if (escaped) put(escaped);
    else if (ticks) {
      const end = closing(text, at, ticks.length);
      if (end < 0) put(ticks);
      else {
        put(h("code", {}, codeText(text.slice(at, end))));
        at = end + ticks.length;
      }
    } else if (bracket) {
      const link = depth < DEEPEST ? linkAt(text, at) : null;
      if (link) {
        put(anchor(link.target, inline(link.label, depth + 1)));
        at = link.end;
      } else put(bracket);
    } else if (angled) put(anchor(angled, [angled]));
    else if (bare) {
      const url = trimmed(bare);
      put(anchor(url, [url]));
      at -= bare.length - url.length;
    } else if (marks) put(delimiter(text, found.index, marks));
    else if (entity) put(ENTITIES[entity]);
    else put(h("br"));
    token.lastIndex = at;
    if (!whole) break;
  }
  if (at < text.length) put(text.slice(at));
  return emphasised(parts);
}

/** Where a run of exactly `n` backticks begins. */
function closing(text, from, n) {
  for (let at = text.indexOf("`", from); at >= 0; at = text.indexOf("`", at)) {
    let end = at;
    while (text[end] === "`") end += 1;
    if (end - at === n) return at;
    at = end;
  }
  return -1;
}

function codeText(text) {
  const own = text.replaceAll("\n", " ");
  return /^ .* $/.test(own) && own.trim() ? own.slice(1, -1) : own;
}

/** A link whose label begins at `from`: `label](target "title")`. */
function linkAt(text, from) {
  let open = 1;
  let at = from;
  for (; at < Math.min(text.length, from + LONGEST) && open; at += 1) {
    if (text[at] === "\\") at += 1;
    else if (text[at] === "[") open += 1;
    else if (text[at] === "]") open -= 1;
  }
  if (open || text[at] !== "(") return null;
  const target = /^\(\s*(?:<([^<>\n]*)>|((?:[^\s()]|\([^\s()]*\))*))(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/.exec(text.slice(at, at + LONGEST));
  if (!target) return null;
  return { label: text.slice(from, at - 1), target: target[1] ?? target[2], end: at + target[0].length };
}

function anchor(target, children) {
  let url = null;
  try {
    url = new URL(target);
  } catch { /* a relative address leads nowhere here */ }
  if (!url || !["http:", "https:", "mailto:"].includes(url.protocol)) return h("span", { title: target }, children);
  return h("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
}

/** An address in running text, without what ends its sentence. */
function trimmed(url) {
  let own = url.replace(/[.,;:!?'*_~]+$/, "");
  while (own.endsWith(")") && own.split(")").length > own.split("(").length) own = own.slice(0, -1);
  return own;
}

function delimiter(text, at, marks) {
  const before = text[at - 1] ?? " ";
  const after = text[at + marks.length] ?? " ";
  const isGap = (character) => /\s/u.test(character);
  const isSign = (character) => /[\p{P}\p{S}]/u.test(character);
  const opens = !isGap(after) && (!isSign(after) || isGap(before) || isSign(before));
  const closes = !isGap(before) && (!isSign(before) || isGap(after) || isSign(after));
  const inWord = marks[0] === "_" && opens && closes;
  return { mark: marks[0], n: marks.length, size: marks.length, opens: opens && !inWord, closes: closes && !inWord };
}

/** Pairs of marks as elements; those without a partner are text. */
function emphasised(parts) {
  const found = [];
  const openers = []; // indexes into `found`
  for (const part of parts) {
    if (!part.mark) {
      found.push(part);
      continue;
    }
    let left = { ...part };
    while (left.closes && left.n) {
      const i = openers.findLastIndex((at) => fits(found[at], left));
      if (i < 0 || (left.mark === "~" && left.n < 2)) break;
      const at = openers[i];
      openers.length = i;
      const opener = found[at];
      const n = opener.n >= 2 && left.n >= 2 ? 2 : 1;
      const inner = found.splice(at + 1).map(plain);
      opener.n -= n;
      left.n -= n;
      if (opener.n) openers.push(at);
      else found.pop();
      found.push(h(left.mark === "~" ? "del" : n === 2 ? "strong" : "em", {}, inner));
    }
    if (left.n) {
      if (left.opens) openers.push(found.length);
      found.push(left);
    }
  }
  return found.map(plain);
}

/** CommonMark's rule: `**a*b**` is one strong text. */
function fits(opener, closer) {
  if (opener.mark !== closer.mark || (opener.mark === "~" && opener.n < 2)) return false;
  const isBoth = opener.closes || closer.opens;
  return !isBoth || (opener.size + closer.size) % 3 !== 0 || (opener.size % 3 === 0 && closer.size % 3 === 0);
}

const plain = (part) => (part.mark ? part.mark.repeat(part.n) : part);
