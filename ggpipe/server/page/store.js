// Conversations, kept in this browser (IndexedDB), and small settings (localStorage).

const NAME = "ggpipe";
const STORE = "conversations";

function promised(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** Without IndexedDB, as in some private windows, conversations last until the page is closed. */
export class Store {
  #database = null;

  /** Returns whether conversations are saved. */
  async open() {
    try {
      const request = indexedDB.open(NAME, 1);
      request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
      this.#database = await promised(request);
      navigator.storage?.persist?.().catch(() => {});
    } catch {
      this.#database = null;
    }
    return this.#database !== null;
  }

  async all() {
    return this.#database ? promised(this.#objects("readonly").getAll()) : [];
  }

  async put(conversation) {
    if (this.#database) await this.#change((objects) => objects.put(conversation));
  }

  async remove(id) {
    if (this.#database) await this.#change((objects) => objects.delete(id));
  }

  #objects(mode) {
    return this.#database.transaction(STORE, mode).objectStore(STORE);
  }

  /** Commits at once: uncommitted data is lost when the page is left or reloaded. */
  #change(request) {
    const objects = this.#objects("readwrite");
    const done = promised(request(objects));
    objects.transaction.commit();
    return done;
  }
}

/** A small value in localStorage. */
export function kept(name, otherwise) {
  const key = `ggpipe.${name}`;
  return {
    get() {
      try {
        return JSON.parse(localStorage.getItem(key)) ?? otherwise;
      } catch {
        return otherwise;
      }
    },
    set(value) {
      try {
        localStorage.setItem(key, JSON.stringify(value));
      } catch { /* no room, or not allowed: it lasts as long as the page */ }
    },
  };
}
