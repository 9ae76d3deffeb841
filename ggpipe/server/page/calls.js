// Tool calls in an answer: their names and arguments, and a field for the results, which the user enters.

import { h } from "./dom.js";

export class Calls {
  #shown = []; // the arguments of each call

  /** `give(results)` gets a string for each call. */
  constructor(give) {
    this.give = give;
    this.list = h("div");
    this.element = h("div", { class: "calls", hidden: true }, this.list);
    this.form = null;
  }

  /** `wantsResults`: the answer has ended with these calls, and is the last message. */
  show(calls, wantsResults) {
    this.element.hidden = calls.length === 0;
    calls.forEach(({ name, text }, i) => {
      if (!this.#shown[i]) {
        this.#shown[i] = h("code");
        this.list.append(h("details", { class: "call" }, h("summary", {}, "Call of ", h("b", {}, name)), h("pre", { tabindex: "0" }, this.#shown[i])));
      }
      const shown = readable(text);
      if (this.#shown[i].textContent !== shown) this.#shown[i].textContent = shown;
    });
    if (wantsResults && calls.length && !this.form) this.#ask(calls);
    else if (!wantsResults && this.form) {
      this.form.remove();
      this.form = null;
    }
  }

  #ask(calls) {
    const areas = calls.map(({ name }) => h("textarea", { rows: 2, placeholder: `Result of ${name}`, "aria-label": `Result of ${name}` }));
    const submit = (event) => {
      event.preventDefault();
      this.give(areas.map(({ value }) => value));
    };
    this.form = h("form", { class: "results", onsubmit: submit }, areas, h("button", { type: "submit", class: "main" }, calls.length > 1 ? "Send the results" : "Send the result"));
    this.element.append(this.form);
  }
}

/** Arguments over several lines, once they are complete. */
function readable(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
