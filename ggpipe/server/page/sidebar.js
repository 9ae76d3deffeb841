// The list of conversations: newest first; each can be renamed and deleted.

import { h, iconButton } from "./dom.js";

/** `act` has `open(conversation)`, `rename(conversation, title)` and `remove(conversation)`. */
export class Sidebar {
  constructor(place, act) {
    this.place = place;
    this.act = act;
  }

  show(conversations, current, isWriting) {
    if (this.place.querySelector("input")) return; // while one is renamed
    const focused = this.place.contains(document.activeElement) ? document.activeElement.dataset.focus : null;
    const newest = [...conversations].sort((a, b) => b.updated - a.updated);
    this.place.replaceChildren(...newest.map((conversation) => this.#row(conversation, conversation === current, isWriting(conversation))));
    if (focused) this.place.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus();
  }

  #row(conversation, isCurrent, isWriting) {
    const title = conversation.title || "New conversation";
    const rename = iconButton("pencil", `Rename ${title}`, () => this.#rename(row, conversation), { "data-focus": `rename ${conversation.id}` });
    const remove = iconButton("trash", `Delete ${title}`, () => this.act.remove(conversation), { "data-focus": `remove ${conversation.id}` });
    const open = h(
      "button",
      { type: "button", class: "open", "aria-current": isCurrent ? "page" : false, title, onclick: () => this.act.open(conversation), "data-focus": conversation.id },
      isWriting && h("span", { class: "beat", role: "img", "aria-label": "is being generated" }), h("span", {}, title),
    );
    const row = h("li", { class: isCurrent ? "current" : "" }, open, rename, remove);
    return row;
  }

  #rename(row, conversation) {
    const input = h("input", { "aria-label": "Title", maxlength: 200 });
    input.value = conversation.title;
    let isOver = false;
    const end = (isKept) => {
      if (isOver) return;
      isOver = true;
      const title = input.value.trim();
      input.remove();
      this.act.rename(conversation, isKept && title ? title : conversation.title);
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") end(true);
      if (event.key === "Escape") {
        event.stopPropagation();
        end(false);
      }
    });
    input.addEventListener("blur", () => end(true));
    row.replaceChildren(input);
    input.focus();
    input.select();
  }
}
