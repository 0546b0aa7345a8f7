// Keeps a page up to date. Every page works without it.
"use strict";

const live = document.getElementById("live");
const article = document.querySelector("[data-job]");
const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

function say(text) {
  if (live && live.textContent !== text) live.textContent = text;
}

// Fetch this page again and exchange the parts that differ.
async function refresh() {
  const answer = await fetch(location.href, { cache: "no-store" });
  if (answer.redirected || (answer.status >= 400 && answer.status < 500)) {
    location.reload(); // signed out, or the job is gone: the page itself says so
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

// A list: the page itself, again and again.
async function watchList(seconds) {
  for (;;) {
    await pause(seconds);
    await shown();
    try {
      await refresh();
      say("");
    } catch {
      say("The service does not answer. Trying again.");
    }
  }
}

// A job: numbers as the service sends them, the rest of the page once a second at most.
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
      say("The connection is lost. Trying again.");
      if (source.readyState === EventSource.CLOSED) {
        stale = true; // where the service answers with an error, the page says which
        setTimeout(() => document.hidden || listen(), 5000);
      }
    });
  }

  // A browser opens few connections to one service: a page that nobody sees gives its own back.
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

// A link from elsewhere comes without the cookie; this page's own request has it.
async function skipSignIn() {
  const answer = await fetch(location.href, { redirect: "manual", cache: "no-store" });
  if (answer.type === "opaqueredirect") location.replace(location.href);
}

if (article) watchJob(article.dataset.job);
else if (live && live.dataset.every) watchList(Number(live.dataset.every));
else if (document.getElementById("signin") && location.search) skipSignIn();
