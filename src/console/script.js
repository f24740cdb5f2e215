// What makes the pages nicer. They do all they have to without it.
"use strict";

// A tooltip with the local time.
document.addEventListener("pointerover", (event) => {
  const time = event.target.closest?.("time[datetime]:not([title])");
  if (time) {
    const options = { dateStyle: "medium", timeStyle: "long" };
    time.title = new Date(time.dateTime).toLocaleString(undefined, options) + " – your time";
  }
});

for (const button of document.querySelectorAll("button[data-copy]")) {
  const source = document.getElementById(button.dataset.copy);
  button.hidden = false;
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(source.textContent);
    } catch {
      // Without HTTPS there is no clipboard to write to, but what is selected can be copied.
      getSelection().selectAllChildren(source);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
}

// A filter holds as soon as it is chosen.
for (const form of document.querySelectorAll("form[data-now]")) {
  form.addEventListener("change", (event) => event.target.matches("select") && form.requestSubmit());
  form.classList.add("now");
}

// The date is asked for where it is wanted.
const expires = document.getElementById("expires");
if (expires) {
  const date = document.querySelector(".date");
  const show = () => (date.hidden = expires.value !== "date");
  expires.addEventListener("change", show);
  show();
}

// A second click would show the list of keys in place of the new secret.
const create = document.querySelector("form[action='/keys'] button[type=submit]");
if (create) {
  create.form.addEventListener("submit", () => (create.disabled = true));
  addEventListener("pageshow", () => (create.disabled = false));
}

// How long there is still to wait.
const wait = document.querySelector("[data-seconds]");
if (wait) {
  let left = Number(wait.dataset.seconds);
  const timer = setInterval(() => {
    left -= 1;
    if (left > 0) wait.textContent = left + (left === 1 ? " second" : " seconds");
    else {
      clearInterval(timer);
      wait.parentElement.textContent = "You can try again now.";
    }
  }, 1000);
}
