// Where messages are written, and text files attached.

import { byId, bytes, h, icon, iconButton, toast } from "./dom.js";

const MOST_BYTES = 1_000_000;

/** `act` has `send(text, files)`, which returns whether the message was accepted, and `stop()`. */
export class Composer {
  #files = [];
  #isWriting = false;

  constructor(act) {
    this.act = act;
    this.input = byId("input");
    this.send = byId("send");
    this.list = byId("files");
    byId("attach").append(icon("clip"));
    byId("attach").addEventListener("click", () => byId("chooser").click());
    byId("chooser").addEventListener("change", (event) => {
      this.attach(event.target.files);
      event.target.value = "";
    });
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#isWriting) this.act.stop();
      else this.#send();
    });
    this.input.addEventListener("input", () => this.#grow());
    this.input.addEventListener("keydown", (event) => {
      const isTouch = matchMedia("(pointer: coarse)").matches; // there Enter begins a line, as in other apps
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || isTouch) return;
      event.preventDefault();
      if (!this.#isWriting) this.#send();
    });
    this.#receiveFiles();
    this.show(false);
  }

  /** `isWriting`: an answer of this conversation is being generated, and the button stops it. */
  show(isWriting) {
    this.#isWriting = isWriting;
    const label = isWriting ? "Stop" : "Send";
    if (this.send.title === label) return;
    this.send.title = label;
    this.send.setAttribute("aria-label", label);
    this.send.classList.toggle("stop", isWriting);
    this.send.replaceChildren(icon(isWriting ? "stop" : "send"));
  }

  focus() {
    if (!matchMedia("(pointer: coarse)").matches) this.input.focus();
  }

  async attach(files) {
    for (const file of files) {
      if (file.size > MOST_BYTES) {
        toast(`${file.name} has ${bytes(file.size)}: at most ${bytes(MOST_BYTES)} of text can be attached`);
        continue;
      }
      try {
        const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
        if (text.includes("\0")) throw new TypeError();
        this.#files.push({ name: file.name, text });
      } catch {
        toast(`${file.name} is no text in UTF-8`);
      }
    }
    this.#showFiles();
    this.focus();
  }

  #send() {
    const text = this.input.value.trim();
    if ((!text && !this.#files.length) || !this.act.send(text, this.#files)) return;
    this.input.value = "";
    this.#files = [];
    this.#showFiles();
    this.#grow();
  }

  #showFiles() {
    this.list.replaceChildren(...this.#files.map((file) => h(
      "li", {}, h("span", {}, file.name), h("small", {}, bytes(file.text.length)),
      iconButton("close", `Remove ${file.name}`, () => {
        this.#files = this.#files.filter((other) => other !== file);
        this.#showFiles();
      }),
    )));
  }

  #grow() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight, 240)}px`;
  }

  #receiveFiles() {
    const drop = byId("drop");
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    let depth = 0;
    const count = (by) => (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      depth = Math.max(depth + by, 0);
      drop.hidden = depth === 0;
    };
    addEventListener("dragenter", count(1));
    addEventListener("dragleave", count(-1));
    addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
    addEventListener("drop", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      depth = 0;
      drop.hidden = true;
      this.attach(event.dataTransfer.files);
    });
    this.input.addEventListener("paste", (event) => {
      if (event.clipboardData?.files.length) this.attach(event.clipboardData.files);
    });
  }
}
