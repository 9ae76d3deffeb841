// The messages of the visible conversation.

import { Calls } from "./calls.js";
import { copyText, counted, h, iconButton, percent, rate, seconds } from "./dom.js";
import { originClass, path, siblings } from "./conversation.js";
import { MarkdownView } from "./markdown.js";

const QUIET_MS = 4000;

const NAMES = { user: "You", assistant: "Model", tool: "Result of a call" };

/** The list. `act` has the actions on a message: `regenerate`, `edit`, `goOn`, `giveResults`, `show`, `askKey`. */
export class Messages {
  #views = new Map();

  constructor(place, answers, act) {
    this.place = place;
    this.answers = answers;
    this.act = act;
    this.colours = false;
  }

  /** Show a conversation. */
  show(conversation) {
    const nodes = path(conversation);
    const known = new Set(nodes.map((node) => node.id));
    for (const [id, view] of this.#views) {
      if (!known.has(id)) {
        view.element.remove();
        this.#views.delete(id);
      }
    }
    let before = null;
    for (const node of nodes) {
      let view = this.#views.get(node.id);
      if (!view) {
        view = new MessageView(this, conversation, node);
        this.#views.set(node.id, view);
      }
      if (view.element.previousSibling !== before || !view.element.parentNode) {
        if (before) before.after(view.element);
        else this.place.prepend(view.element);
      }
      view.update();
      before = view.element;
    }
  }

  clear() {
    this.place.replaceChildren();
    this.#views.clear();
  }

  /** A message has changed. */
  update(node) {
    this.#views.get(node.id)?.update();
  }

  updateAll() {
    for (const view of this.#views.values()) view.update();
  }

  /** Update the line below answers in progress, as time passes and ranks restart. */
  tick(live) {
    for (const view of this.#views.values()) view.tick(live);
  }
}

class MessageView {
  #shown = "";

  constructor(list, conversation, node) {
    this.list = list;
    this.conversation = conversation;
    this.node = node;
    const isUser = node.role === "user";
    this.text = h("div", { class: "text" });
    this.reasoning = null;
    this.calls = node.role === "assistant" ? new Calls((results) => list.act.giveResults(node, results)) : null;
    this.status = h("p", { class: "status" });
    this.actions = h("div", { class: "actions" });
    this.element = h(
      "article", { class: `message ${node.role}`, "aria-label": NAMES[node.role], "data-id": node.id },
      isUser && (node.files ?? []).map((file) => h("details", { class: "file" }, h("summary", {}, file.name), h("pre", { tabindex: "0" }, file.text))),
      node.role === "tool" ? h("details", { class: "call" }, h("summary", {}, "Result of ", h("b", {}, node.name)), this.text) : this.text,
      this.calls?.element, this.status, this.actions,
    );
    this.markdown = new MarkdownView(this.text);
  }

  update() {
    const { node, list } = this;
    this.#updateReasoning();
    const colours = list.colours && node.origins;
    const key = `${Boolean(colours)}${node.content}`;
    if (key !== this.#shown) {
      this.#shown = key;
      this.#updateText(colours);
    }
    const isWriting = node.state === "writing" && list.answers.of(node);
    this.calls?.show(node.calls ?? [], node.state === "done" && node.id === this.conversation.leaf);
    this.element.setAttribute("aria-busy", String(Boolean(isWriting)));
    this.element.classList.toggle("writing", Boolean(isWriting));
    if (!isWriting) this.status.replaceChildren(...this.#summary());
    this.#updateActions(isWriting);
  }

  #updateText(colours) {
    const { node } = this;
    const isPlain = node.role !== "assistant" || colours;
    if (isPlain || this.text.classList.contains("plain")) {
      this.text.replaceChildren();
      this.markdown = new MarkdownView(this.text);
    }
    this.text.classList.toggle("plain", Boolean(isPlain));
    if (colours) {
      let at = 0;
      for (const [n, origin] of node.origins) {
        this.text.append(h("span", { class: originClass(origin), title: origin }, node.content.slice(at, at + n)));
        at += n;
      }
      this.text.append(node.content.slice(at));
    } else if (isPlain) this.text.append(node.content);
    else this.markdown.show(node.content);
  }

  #updateReasoning() {
    const { reasoning, content, calls } = this.node;
    if (!reasoning) return;
    if (!this.reasoning) {
      const body = h("div", { class: "text" });
      this.reasoning = {
        element: h("details", { class: "reasoning" }, h("summary", {}, "Reasoning"), body), view: new MarkdownView(body), shown: "",
      };
      this.text.before(this.reasoning.element);
    }
    this.reasoning.element.classList.toggle("now", !content && !calls && this.node.state === "writing");
    if (this.reasoning.shown !== reasoning) {
      this.reasoning.shown = reasoning;
      this.reasoning.view.show(reasoning);
    }
  }

  /** The line below an answer: its figures, or what went wrong. */
  #summary() {
    const { node } = this;
    if (node.role !== "assistant") return [];
    const { act } = this.list;
    const link = (text, onclick) => h("button", { type: "button", class: "link", onclick }, text);
    const hasBegun = node.content || node.reasoning;
    const goOn = hasBegun && !node.calls ? link("Continue", () => act.goOn(node)) : link("Try again", () => act.regenerate(node));
    if (node.state === "broken") {
      const again = node.status === 401 && !hasBegun ? link("Enter a key", () => act.askKey()) : goOn;
      return [h("span", { class: "error" }, node.error ?? "The page was closed while this was being generated."), again];
    }
    if (node.state === "stopped") return [h("span", {}, "stopped"), goOn];
    const parts = figures(node.timings).map((text) => h("span", {}, text));
    if (node.finish === "length") parts.push(h("span", {}, "cut off"), goOn);
    return parts;
  }

  tick(live) {
    const run = this.list.answers.of(this.node);
    if (!run) return;
    const now = performance.now();
    const waited = (from) => `${Math.floor((now - from) / 1000)} s`;
    let parts;
    if (live?.status === "restarting") {
      parts = [h("span", { class: "warning" }, "The ranks are restarting…"), h("span", {}, percent(live.progress)), h("span", {}, "then the answer continues")];
    } else if (run.first === null) {
      parts = [...prefill(run.progress, live), h("span", {}, waited(run.began))];
    } else {
      const speed = run.tokens > 1 ? (run.tokens - 1) / ((run.last - run.first) / 1000) : null;
      parts = [h("span", {}, counted(run.tokens, "token")), h("span", {}, rate(Number.isFinite(speed) ? speed : null))];
      if (now - run.last > QUIET_MS) parts.push(h("span", { class: "warning" }, `no token for ${waited(run.last)}`));
    }
    this.status.replaceChildren(h("span", { class: "beat", "aria-hidden": "true" }), ...parts);
  }

  #updateActions(isWriting) {
    const { node, conversation } = this;
    const { act } = this.list;
    const others = siblings(conversation, node);
    const key = `${Boolean(isWriting)} ${others.length} ${others.indexOf(node)}`;
    if (this.actions.dataset.key === key) return;
    this.actions.dataset.key = key;
    const buttons = [];
    if (others.length > 1) {
      const at = others.indexOf(node);
      const step = (by) => () => act.show(others[at + by]);
      buttons.push(
        iconButton("left", "Earlier version", step(-1), { disabled: at === 0 }),
        h("span", { class: "versions" }, `${at + 1}/${others.length}`),
        iconButton("right", "Later version", step(1), { disabled: at === others.length - 1 }),
      );
    }
    if (!isWriting) {
      const copy = iconButton("copy", "Copy", () => copyText([node.content, ...(node.calls ?? []).map(({ text }) => text)].filter(Boolean).join("\n"), copy));
      buttons.push(copy);
      if (node.role === "user") buttons.push(iconButton("pencil", "Edit", () => this.#edit()));
      if (node.role === "assistant") buttons.push(iconButton("again", "Regenerate", () => act.regenerate(node)));
    }
    this.actions.replaceChildren(...buttons);
  }

  #edit() {
    const area = h("textarea", { "aria-label": "Edit the message", rows: 3 });
    area.value = this.node.content;
    const close = () => {
      form.remove();
      this.element.classList.remove("edited");
    };
    const submit = (event) => {
      event.preventDefault();
      close();
      this.list.act.edit(this.node, area.value.trim());
    };
    const onkeydown = (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      }
    };
    area.addEventListener("keydown", onkeydown);
    const form = h(
      "form", { class: "edit", onsubmit: submit }, area,
      h("div", { class: "row" }, h("button", { type: "button", class: "link", onclick: close }, "Cancel"), h("button", { type: "submit", class: "main" }, "Send")),
    );
    this.element.classList.add("edited");
    this.element.append(form);
    area.style.height = `${Math.min(area.scrollHeight + 2, 320)}px`;
    area.focus();
  }
}

/** The line before the first token. `progress`: the server's `prompt_progress`, or null before it arrives. */
function prefill(progress, live) {
  if (!progress?.processed && live?.requests.waiting) return [h("span", {}, "waiting in the queue")];
  if (!progress) return [h("span", {}, "reading the prompt")];
  const { total, cache, processed } = progress;
  const bar = h("progress", { max: Math.max(total - cache, 1), value: processed - cache, "aria-label": "Prompt" });
  return [h("span", {}, "reading the prompt"), bar, h("span", {}, `${processed.toLocaleString("en")} of ${counted(total, "token")}`)];
}

/** The same line as below an answer of `ggpipe chat`. */
function figures(timings) {
  if (!timings) return [];
  const found = [counted(timings.predicted_n, "token"), rate(timings.predicted_n > 1 ? timings.predicted_per_second : null)];
  found.push(`prompt ${timings.prompt_n + timings.cache_n}${timings.cache_n ? ` (${timings.cache_n} cached)` : ""}`);
  found.push(`TTFT ${seconds(timings.prompt_ms / 1000)}`);
  if (timings.draft_n) found.push(`acceptance ${percent(timings.draft_n_accepted / timings.draft_n)}`);
  return found;
}
