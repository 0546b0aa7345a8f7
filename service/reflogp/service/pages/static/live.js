// Update a page while it is open. Every page also works without this script.
"use strict";

const live = document.getElementById("live");
const article = document.querySelector("[data-job]");
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

// Refresh a list page every few seconds.
async function watchList(seconds) {
  for (;;) {
    await pause(seconds);
    await shown();
    try {
      await refresh();
      say("");
    } catch {
      say("The service is not responding. Trying again.");
    }
  }
}

// Refresh a job page: the progress bar on every event from the service, the other parts at most once per second.
function watchJob(id) {
  let source = null;
  let stale = false;
  let ended = false;

  function show(job) {
    const bar = document.getElementById("progress");
    const { done, sequences } = job.progress;
    if (!bar || !sequences) return;
    const count = (value) => value.toLocaleString("en-US");
    bar.max = sequences;
    bar.value = done;
    const share = Math.floor((1000 * done) / sequences) / 10;
    document.getElementById("progress-text").textContent = `${count(done)} of ${count(sequences)} sequences (${share}%)`;
  }

  function listen() {
    if (source) source.close();
    source = new EventSource(`/v1/jobs/${encodeURIComponent(id)}/events`);
    source.addEventListener("open", () => say("live"));
    source.addEventListener("job", (event) => {
      show(JSON.parse(event.data));
      stale = true;
    });
    source.addEventListener("end", (event) => {
      source.close();
      ended = stale = true;
      say(`The job is ${JSON.parse(event.data).state}.`);
    });
    source.addEventListener("error", () => {
      if (ended) return;
      say("The connection was lost. Trying again.");
      if (source.readyState === EventSource.CLOSED) {
        stale = true; // if the service responds with an error, the fetched page shows the error
        setTimeout(() => document.hidden || listen(), 5000);
      }
    });
  }

  // Browsers open only a few connections to the same service, so a hidden page closes its connection.
  document.addEventListener("visibilitychange", () => {
    if (ended) return;
    if (document.hidden) source.close();
    else listen();
  });

  async function keep() {
    for (;;) {
      await pause(1);
      await shown();
      if (!stale) continue;
      stale = false;
      try {
        await refresh();
        if (ended) return;
      } catch {
        stale = true;
      }
    }
  }

  listen();
  keep();
}

// When a link on another site opens this page, the browser sends no cookie. A request made by this page includes the cookie.
async function skipSignIn() {
  const answer = await fetch(location.href, { redirect: "manual", cache: "no-store" });
  if (answer.type === "opaqueredirect") location.replace(location.href);
}

if (article) watchJob(article.dataset.job);
else if (live && live.dataset.every) watchList(Number(live.dataset.every));
else if (document.getElementById("signin") && location.search) skipSignIn();
