// The table of adapters, loading and unloading.

import { postAdmin } from "./api.js";
import { find, make, say } from "./dom.js";

let onChange = () => {};

async function change(path, body) {
  const message = find("adapters-message");
  try {
    say(message, await postAdmin(path, body));
  } catch (error) {
    say(message, error.message, true);
  }
  onChange();
}

function row(adapter) {
  const unload = make("button", { type: "button" }, "Unload");
  unload.setAttribute("aria-label", `Unload ${adapter.name}`);
  unload.addEventListener("click", () =>
    change("v1/unload_lora_adapter", { lora_name: adapter.name }),
  );
  const state = adapter.ready ? "in device memory" : "loaded, host memory";
  return make(
    "tr",
    {},
    make("td", {}, adapter.name),
    make("td", {}, adapter.pinned ? `${state}, pinned` : state),
    make("td", { className: "number" }, String(adapter.rank)),
    make("td", { className: "number" }, String(adapter.num_users)),
    make("td", { className: "quiet" }, adapter.path),
    make("td", { className: "number" }, unload),
  );
}

let shown = "";

/** Redraws only what changed: focus stays where it is. */
export function showAdapters(adapters, stats) {
  find("adapters-summary").textContent =
    `${stats.num_adapters_resident} in device memory, room for ${stats.num_adapter_slots} ` +
    `in one batch, ${adapters.length} loaded.`;
  const now = JSON.stringify(adapters);
  if (now === shown) return;
  shown = now;
  find("adapters").replaceChildren(...adapters.map(row));
}

export function startAdapters(changed) {
  onChange = changed;
  find("load-form").addEventListener("submit", (event) => {
    event.preventDefault();
    change("v1/load_lora_adapter", {
      lora_name: find("load-name").value,
      lora_path: find("load-path").value,
      load_inplace: find("load-replace").checked,
      pinned: find("load-pinned").checked,
    });
  });
}
