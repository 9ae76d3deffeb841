// A conversation is a tree of messages: an edited or regenerated one becomes a sibling of the first, and both remain accessible.
//
// Each node has its parent's id; `leaf` is the end of the visible path. Roles are `user`, `assistant`, and `tool`
// for the result of a call. States of an answer: `writing`, `done`, `stopped` by the user, `broken`.

const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(9)), (byte) => byte.toString(36).padStart(2, "0")).join("");

export function newConversation(settings) {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, settings: structuredClone(settings), nodes: [], leaf: null };
}

export const nodeOf = (conversation, id) => conversation.nodes.find((node) => node.id === id) ?? null;

/** From the first message to `leaf`, or to another node. */
export function path(conversation, end = conversation.leaf) {
  const found = [];
  for (let node = nodeOf(conversation, end); node; node = nodeOf(conversation, node.parent)) found.unshift(node);
  return found;
}

/** Add a message after `parent` (an id, null for the first one), and show it. */
export function add(conversation, parent, fields) {
  const node = { id: newId(), parent, at: Date.now(), content: "", ...fields };
  conversation.nodes.push(node);
  conversation.leaf = node.id;
  conversation.updated = Date.now();
  if (!conversation.title && node.role === "user") conversation.title = titleOf(node);
  return node;
}

export const siblings = (conversation, node) => conversation.nodes.filter((other) => other.parent === node.parent);

/** Show the path through a node, and after it the newest messages. */
export function select(conversation, node) {
  let leaf = node;
  for (let next = node; next; next = conversation.nodes.findLast((other) => other.parent === leaf.id)) leaf = next;
  conversation.leaf = leaf.id;
}

function titleOf(node) {
  const line = (node.content.trim() || node.files?.[0]?.name || "").split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 57).trimEnd()}…` : line;
}

/** The messages up to a node, for OpenAI's API. A message with files begins with their contents. */
export function messages(conversation, end) {
  const system = conversation.settings.system?.trim();
  const own = path(conversation, end).map((node, i, all) => {
    if (node.role === "user") return { role: "user", content: withFiles(node) };
    if (node.role === "tool") return { role: "tool", tool_call_id: node.call, content: node.content };
    const message = { role: "assistant", content: node.content };
    if (node.reasoning) message.reasoning_content = node.reasoning;
    if (all[i + 1]?.role === "tool") { // templates want a result after each call
      message.tool_calls = node.calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
    }
    return message;
  });
  return system ? [{ role: "system", content: system }, ...own] : own;
}

function withFiles({ content, files = [] }) {
  const texts = files.map(({ name, text }) => {
    const longest = Math.max(2, ...Array.from(text.matchAll(/`{3,}/g), (found) => found[0].length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...texts, content].filter(Boolean).join("\n\n");
}

/** The next part of a call, which is one of `calls` of its answer: `{id, name, text}`, with the arguments in JSON. */
export function addToCall(node, { index, id, function: part }) {
  node.calls ??= [];
  node.calls[index] ??= { id, name: part.name, text: "" };
  node.calls[index].text += part.arguments ?? "";
}

/** Where a token comes from: `own`, `drafted`, the name of its drafter, or `several`. */
export function originOf({ origin, drafters }) {
  return drafters?.length ? (drafters.length > 1 ? "several" : drafters[0]) : origin;
}

/** The CSS class of text from there. */
export function originClass(origin) {
  return origin === "own" ? "own" : `drafted ${origin.replaceAll(" ", "-")}`;
}

/** Append text to an answer. `origins` has the lengths of runs of characters with the same origin. */
export function write(node, text, origin) {
  node.content += text;
  if (!origin) return;
  node.origins ??= [];
  const last = node.origins.at(-1);
  if (last && last[1] === origin) last[0] += text.length;
  else node.origins.push([text.length, origin]);
}
