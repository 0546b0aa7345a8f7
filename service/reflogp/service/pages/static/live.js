// Update a page while it is open. Every page also works without this script.
"use strict";

const live = document.getElementById("live");
const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

function say(text) {
  if (live && live.textContent !== text) live.textContent = text;
}

// Fetch this page again and replace the parts that have changed.
async function refresh() {
  const answer = await fetch(location.href, { cache: "no-store" });
  if (answer.redirected || (answer.status >= 400 && answer.status < 500)) {
    location.reload(); // the user has signed out, or the job no longer exists: the reloaded page says so
    return;
  }
  if (!answer.ok) throw new Error(answer.statusText);
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const part of fresh.querySelectorAll("[data-part]")) {
    const old = document.querySelector(`[data-part="${part.dataset.part}"]`);
    if (!old || old.outerHTML === part.outerHTML) continue;
    const focused = old.contains(document.activeElement) ? document.activeElement : null;
    old.replaceWith(part);
    if (focused) (document.getElementById(focused.id) || document.getElementById("main")).focus();
  }
  document.title = fresh.title;
}

const shown = () => new Promise((resolve) => {
  if (!document.hidden) resolve();
  else document.addEventListener("visibilitychange", resolve, { once: true });
});

// Refresh the page every few seconds, as long as it says how many.
async function follow() {
  if (!document.querySelector("[data-every]")) return;
  for (let part; (part = document.querySelector("[data-every]")); ) {
    await pause(Number(part.dataset.every));
    await shown();
    try {
      await refresh();
      say("");
    } catch {
      say("The service is not responding. Trying again.");
    }
  }
  const ended = document.querySelector("[data-state]");
  if (ended) say(`The job is ${ended.dataset.state}.`);
}

follow();
