// The state of the pipeline (`/live`), while the page is visible.

import { ApiError, ask, events } from "./api.js";

const LONGEST_WAIT_MS = 10_000;
const SILENT_MS = 20_000; // it says something every 5 s

/** Calls `show(sample, error)` for each sample. Without a sample it is null, and `error` says why. */
export class Live {
  #controller = null;
  #wake = () => {};

  constructor(show) {
    this.show = show;
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) this.#controller?.abort();
      else this.again();
    });
    this.#run();
  }

  /** Ask again now: a key was entered, or the page became visible. */
  again() {
    this.#wake();
  }

  async #run() {
    for (let failures = 0; ; ) {
      if (document.hidden) await new Promise((resolve) => { this.#wake = resolve; });
      try {
        await this.#watch(() => { failures = 0; });
        this.show(null, "");
      } catch (error) {
        if (document.hidden) continue;
        this.show(null, error instanceof ApiError ? error : null);
      }
      const wait = Math.min(500 * 2 ** failures, LONGEST_WAIT_MS);
      failures += 1;
      await new Promise((resolve) => {
        this.#wake = resolve;
        setTimeout(resolve, wait);
      });
    }
  }

  async #watch(on) {
    const controller = new AbortController();
    this.#controller = controller;
    let timer = setTimeout(() => controller.abort(), SILENT_MS);
    try {
      for await (const { data } of events(await ask("live", { signal: controller.signal }))) {
        clearTimeout(timer);
        timer = setTimeout(() => controller.abort(), SILENT_MS);
        if (!data) continue;
        on();
        this.show(JSON.parse(data), null);
      }
    } finally {
      clearTimeout(timer);
      controller.abort();
    }
  }
}
