// Answers that are being generated. They continue while another conversation is shown.

import { ApiError, ask, events, serverStatus } from "./api.js";
import { addToCall, messages, originOf, write } from "./conversation.js";
import { sampling } from "./settings.js";

const LOADING_POLL_MS = 500;

export class Answers {
  #running = new Map(); // by the node's id: how it is stopped, and what is known of it but for its text

  /** `on.change(conversation, node)`: more has arrived. `on.end(conversation, node)`. `on.save(conversation)`. */
  constructor(on) {
    this.on = on;
  }

  /** `{began, first, last, tokens, heard, progress}` during generation; times as `performance.now`, and `progress` as
   * the server's `prompt_progress`. */
  of(node) {
    return this.#running.get(node.id) ?? null;
  }

  get count() {
    return this.#running.size;
  }

  in(conversation) {
    return conversation.nodes.some((node) => this.#running.has(node.id));
  }

  stop(conversation) {
    for (const node of conversation.nodes) this.#running.get(node.id)?.controller.abort();
  }

  /** Save what has arrived since the last time. */
  save() {
    for (const run of this.#running.values()) {
      if (run.isChanged) this.on.save(run.conversation);
      run.isChanged = false;
    }
  }

  /** Generate a node of the assistant, after the text that it has. */
  async write(conversation, node) {
    const run = { conversation, isChanged: false, controller: new AbortController(), began: performance.now(), first: null, last: null, tokens: 0, heard: performance.now(), progress: null };
    this.#running.set(node.id, run);
    Object.assign(node, { state: "writing", error: undefined, finish: undefined });
    const isBehind = Boolean(node.content || node.reasoning);
    this.on.change(conversation, node);
    try {
      await this.on.save(conversation);
      const body = {
        messages: messages(conversation, isBehind ? node.id : node.parent),
        stream: true,
        return_origins: true,
        return_progress: true,
        ...sampling(conversation.settings),
      };
      const response = await this.#asked(body, run);
      for await (const { data } of events(response)) {
        run.heard = performance.now();
        if (data === "[DONE]") break;
        if (data) this.#take(node, run, JSON.parse(data));
        run.isChanged ||= Boolean(data);
        this.on.change(conversation, node);
      }
      node.state = node.finish ? "done" : "broken";
      if (!node.finish) node.error = "The stream ended early.";
    } catch (error) {
      this.#fail(node, run, error);
    }
    this.#running.delete(node.id);
    conversation.updated = Date.now();
    this.on.end(conversation, node);
    await this.on.save(conversation);
  }

  /** The response, once the model is loaded. */
  async #asked(body, run) {
    for (let isLoaded = false; ; ) {
      try {
        return await ask("v1/chat/completions", { body, signal: run.controller.signal });
      } catch (error) {
        const status = error.status === 503 ? await serverStatus() : null;
        // The model may have been loaded since the response: ask once more.
        if (status !== "loading" && (status !== "ok" || isLoaded)) throw error;
        isLoaded = status === "ok";
      }
      await new Promise((resolve) => setTimeout(resolve, LOADING_POLL_MS));
      run.heard = performance.now();
    }
  }

  #take(node, run, chunk) {
    if (chunk.error) throw ApiError.of(chunk, 500);
    if (chunk.prompt_progress) run.progress = chunk.prompt_progress;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? {};
    if (content || reasoning || calls) {
      run.first ??= run.heard;
      run.last = run.heard;
      run.tokens += 1;
    }
    if (reasoning) node.reasoning = (node.reasoning ?? "") + reasoning;
    if (content) write(node, content, originOf(choice));
    for (const call of calls ?? []) addToCall(node, call);
    if (choice.finish_reason) {
      node.finish = choice.finish_reason;
      node.timings = chunk.timings;
    }
  }

  #fail(node, run, error) {
    if (run.controller.signal.aborted) {
      node.state = "stopped";
      return;
    }
    node.state = "broken";
    node.status = error instanceof ApiError ? error.status : 0;
    node.error = error instanceof ApiError ? error.message : "The connection to the server was lost.";
  }
}
