// The page: what is shown, and what happens on user actions.

import { Answers } from "./answers.js";
import { apiKey, ask } from "./api.js";
import { Composer } from "./composer.js";
import { add, newConversation, nodeOf, select } from "./conversation.js";
import { byId, h, icon, iconButton, toast } from "./dom.js";
import { Live } from "./live.js";
import { Messages } from "./messages.js";
import { Pipeline } from "./pipeline.js";
import { NOTHING, editSettings, isChanged } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Store, kept } from "./store.js";

const lastSettings = kept("settings", NOTHING);
const lastOpen = kept("open", null);
const colours = kept("colours", false);
const isPipelineShown = kept("pipeline", true);

const store = new Store();
let conversations = [];
let current = newConversation(lastSettings.get());
let sample = null; // the last one of the pipeline
let usual = {}; // the server's own settings
let isAtEnd = true;

const scroll = byId("scroll");
const say = (text) => { byId("spoken").textContent = text; };

// Conversations

async function save(conversation) {
  if (!conversations.includes(conversation)) return; // deleted meanwhile
  try {
    await store.put(conversation);
  } catch {
    toast("This browser has no more space for conversations: delete some");
  }
}

function open(conversation) {
  current = conversation;
  lastOpen.set(conversation.id);
  messages.clear();
  isAtEnd = true;
  show();
  hideDrawers();
  composer.focus();
}

function begin() {
  open(newConversation(lastSettings.get()));
}

async function remove(conversation) {
  answers.stop(conversation);
  conversations = conversations.filter((other) => other !== conversation);
  await store.remove(conversation.id);
  if (conversation === current) begin();
  else show();
  toast("Deleted.", "Undo", () => {
    conversations.push(conversation);
    save(conversation);
    open(conversation);
  });
}

function rename(conversation, title) {
  conversation.title = title;
  save(conversation);
  show();
}

// Messages

function answer(parent) {
  const node = add(current, parent, { role: "assistant" });
  isAtEnd = true;
  answers.write(current, node);
  show();
}

function isBusy() {
  if (answers.in(current)) toast("An answer is being generated: stop it first");
  return answers.in(current);
}

function send(text, files) {
  if (isBusy()) return false;
  if (!conversations.includes(current)) {
    conversations.push(current);
    lastOpen.set(current.id);
  }
  answer(add(current, current.leaf, { role: "user", content: text, files }).id);
  return true;
}

const act = {
  regenerate: (node) => isBusy() || answer(node.parent),
  edit: (node, text) => {
    if (isBusy() || (!text && !node.files?.length)) return;
    answer(add(current, node.parent, { role: "user", content: text, files: node.files }).id);
  },
  goOn: (node) => {
    if (isBusy()) return;
    answers.write(current, node);
    show();
  },
  giveResults: (node, results) => {
    if (isBusy()) return;
    let parent = node.id;
    node.calls.forEach(({ id, name }, i) => {
      parent = add(current, parent, { role: "tool", call: id, name, content: results[i] }).id;
    });
    answer(parent);
  },
  show: (node) => {
    select(current, node);
    save(current);
    show();
  },
  askKey: () => editKey("The server requires an API key."),
};

const answers = new Answers({
  change: (conversation, node) => conversation === current && paint(node),
  save,
  end: (conversation, node) => {
    if (conversation === current) {
      show();
      say(node.state === "broken" ? node.error : "The answer is complete.");
    } else showList();
    if (node.status === 401) act.askKey();
  },
});

// What is shown. New text is drawn once per frame.

const changed = new Set();

function paint(node) {
  if (!changed.size) {
    requestAnimationFrame(() => {
      for (const one of changed) messages.update(one);
      changed.clear();
      messages.tick(sample);
      follow();
    });
  }
  changed.add(node);
}

function follow() {
  if (isAtEnd) scroll.scrollTop = scroll.scrollHeight;
  byId("latest").hidden = isAtEnd;
}

function showList() {
  sidebar.show(conversations, current, (conversation) => answers.in(conversation));
}

function show() {
  messages.show(current);
  messages.tick(sample);
  showList();
  const title = current.title || "New conversation";
  byId("title").textContent = title;
  document.title = current.title ? `${title} · ggpipe` : "ggpipe";
  byId("welcome").hidden = current.nodes.length > 0;
  byId("show-settings").classList.toggle("changed", isChanged(current.settings));
  composer.show(answers.in(current));
  follow();
}

function editKey(why = "") {
  const dialog = byId("key-dialog");
  if (dialog.open) return;
  const input = h("input", { id: "key-input", type: "password", autocomplete: "off", spellcheck: "false" });
  input.value = apiKey.get();
  const submit = (event) => {
    event.preventDefault();
    apiKey.set(input.value.trim());
    dialog.close();
    live.again();
    learn();
  };
  dialog.replaceChildren(h(
    "form", { onsubmit: submit },
    h("header", {}, h("h2", { id: "key-title" }, "API key"), iconButton("close", "Close", () => dialog.close())),
    h("div", { class: "body" }, why && h("p", {}, why), h("label", { for: "key-input" }, "Key"), input, h("p", { class: "about" }, "It stays in this browser, and is sent only to this server.")),
    h("footer", {}, h("button", { type: "submit", class: "main" }, "Use it")),
  ));
  dialog.showModal();
}

function hideDrawers() {
  for (const name of ["list", "pipeline"]) {
    document.body.classList.remove(`${name}-open`);
    byId(`show-${name}`).setAttribute("aria-expanded", "false");
  }
}

function toggle(name) {
  const isOpen = document.body.classList.toggle(`${name}-open`);
  byId(`show-${name}`).setAttribute("aria-expanded", String(isOpen));
}

/** The server's own settings. */
async function learn() {
  try {
    const props = await (await ask("props")).json();
    const { params } = props.default_generation_settings;
    usual = params;
    byId("welcome-model").textContent = props.model_alias;
  } catch { /* it loads, or wants a key: asked again when it is ready */ }
}

let hasAskedKey = false;

function showSample(news, error) {
  const wasReady = sample?.status === "ok";
  const wasRestarting = sample?.status === "restarting";
  sample = news;
  const needsKey = error?.status === 401;
  pipeline.show(news, needsKey);
  if (needsKey && !hasAskedKey) {
    hasAskedKey = true;
    editKey("The server requires an API key.");
  }
  if (news?.status === "ok" && !wasReady) learn();
  const isRestarting = news?.status === "restarting";
  if (isRestarting !== wasRestarting) say(isRestarting ? "The ranks are restarting." : "The ranks are ready again.");
  const notice = byId("notice");
  const text = needsKey ? "" : news === null ? "No connection to the server. Trying again." : news.status === "loading"
    ? `The model is loading: ${Math.round(news.progress * 100)} %` : isRestarting
      ? `A rank was lost. The ranks are restarting: ${Math.round(news.progress * 100)} %` : news.status === "stopping" ? "The server is shutting down." : "";
  notice.hidden = !text;
  if (notice.textContent !== text) notice.textContent = text;
  messages.tick(sample);
}

// The parts

const messages = new Messages(byId("messages"), answers, act);
messages.colours = colours.get();
const sidebar = new Sidebar(byId("conversations"), { open, rename, remove });
const composer = new Composer({ send, stop: () => answers.stop(current) });
const pipeline = new Pipeline(byId("pipeline"), byId("strip"), {
  colours: (areColoured) => {
    colours.set(areColoured);
    messages.colours = areColoured;
    messages.updateAll();
  },
  close: () => hideDrawers(),
}, colours.get());

byId("new").append(icon("plus"), "New");
byId("new").addEventListener("click", begin);
byId("key").addEventListener("click", () => editKey());
for (const [name, drawing] of [["list", "list"], ["settings", "sliders"], ["pipeline", "pulse"]]) byId(`show-${name}`).append(icon(drawing));
byId("show-list").addEventListener("click", () => toggle("list"));
byId("show-pipeline").addEventListener("click", () => {
  if (matchMedia("(max-width: 70rem)").matches) toggle("pipeline");
  else {
    isPipelineShown.set(!isPipelineShown.get());
    document.body.classList.toggle("no-pipeline", !isPipelineShown.get());
  }
});
byId("strip").addEventListener("click", () => toggle("pipeline"));
byId("show-settings").addEventListener("click", () => editSettings(current.settings, usual, (settings) => {
  current.settings = settings;
  lastSettings.set(settings);
  save(current);
  show();
}));
byId("latest").addEventListener("click", () => {
  isAtEnd = true;
  follow();
});
scroll.addEventListener("scroll", () => {
  isAtEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 48;
  byId("latest").hidden = isAtEnd;
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (document.body.classList.contains("list-open") || document.body.classList.contains("pipeline-open")) hideDrawers();
  else answers.stop(current);
});
addEventListener("click", (event) => {
  const isOutside = !event.target.closest("#sidebar, #pipeline, #show-list, #show-pipeline, #strip, dialog, #toast");
  if (isOutside) hideDrawers();
});
setInterval(() => {
  answers.save();
  pipeline.tick();
  messages.tick(sample);
}, 1000);
document.body.classList.toggle("no-pipeline", !isPipelineShown.get());

const live = new Live(showSample);
const isKept = await store.open();
conversations = await store.all();
for (const conversation of conversations) {
  for (const node of conversation.nodes) if (node.state === "writing") node.state = "broken"; // the page was closed
}
const last = conversations.find(({ id }) => id === lastOpen.get());
if (last && nodeOf(last, last.leaf)) open(last);
else show();
if (!isKept) toast("This browser cannot save conversations: they last until the page is closed");
composer.focus();
