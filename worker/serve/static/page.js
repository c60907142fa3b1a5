"use strict";
// Keeps the page live, takes dropped files, and asks before what cannot be undone. Without it the page works, too.

const note = document.getElementById("live");

function replace(part) {
  const shown = document.getElementById(part.id);
  if (!shown || shown.innerHTML === part.innerHTML) return;
  const focused = shown.contains(document.activeElement) ? document.activeElement.id : "";
  shown.innerHTML = part.innerHTML;
  if (focused) document.getElementById(focused)?.focus();
}

function live(url) {
  let events = null, again = 0, hasEnded = false;
  function open() {
    events = new EventSource(url);
    events.onopen = () => { note.textContent = "Live"; };
    events.onmessage = (event) => {
      const parts = document.createElement("template");
      parts.innerHTML = event.data;
      parts.content.querySelectorAll("[data-live]").forEach(replace);
      if (parts.content.querySelector("[data-ended]")) {  // nothing changes any more
        hasEnded = true;
        events.close();
        note.textContent = "";
      }
    };
    events.onerror = () => {
      if (events.readyState !== EventSource.CLOSED) return;  // it tries again by itself
      note.textContent = "Not live: trying again";
      clearTimeout(again);
      again = setTimeout(open, 10_000);
    };
  }
  // A page that nobody looks at needs no connection.
  document.addEventListener("visibilitychange", () => {
    events.close();
    clearTimeout(again);
    if (!document.hidden && !hasEnded) open();
  });
  open();
}

if (note?.dataset.events) live(note.dataset.events);

document.addEventListener("submit", (event) => {
  const question = event.target.dataset.ask;
  if (question && !confirm(question)) event.preventDefault();
});

const drop = document.querySelector("[data-drop]");
if (drop) {
  const over = (is) => (event) => { event.preventDefault(); drop.classList.toggle("over", is); };
  drop.addEventListener("dragover", over(true));
  drop.addEventListener("dragleave", over(false));
  drop.addEventListener("drop", (event) => {
    over(false)(event);
    if (!event.dataTransfer.files.length) return;
    drop.querySelector("input[type=file]").files = event.dataTransfer.files;
    drop.requestSubmit();
  });
}
