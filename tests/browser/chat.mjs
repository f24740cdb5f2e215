// Has a conversation with a chat interface in Chromium, for interfaces.py: writes what is shown as JSON to standard output.
import { chromium } from "playwright-core";

const { interface: name, address, questions, shot } = JSON.parse(process.argv[2]);
const patience = 60_000;

const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium-headless-shell",
  args: ["--no-sandbox", "--disable-gpu"],
});
const page = await browser.newPage({ viewport: { width: 1280, height: 900 } });
page.setDefaultTimeout(patience);
// Nothing comes from an outside host, such as fonts.
await page.route((url) => url.hostname !== new URL(address).hostname, (route) => route.abort());
await page.goto(address);

const openWebUI = {
  answers: page.locator(".chat-assistant"),
  async prepare() {
    // The news of the version cover the page at the first visit.
    const news = page.getByRole("button", { name: "Okay, Let's Go!" });
    await page.addLocatorHandler(news, () => news.click());
    // The model is chosen in a list of those that the gateway names.
    await page.locator("button", { hasText: "adriaticum" }).first().waitFor();
  },
  async ask(question) {
    await page.locator("#chat-input").click();
    await page.keyboard.type(question);
    await page.keyboard.press("Enter");
  },
  // The title comes after the first answer.
  title: () => page.waitForFunction(() => !/^(New Chat|Open WebUI)/.test(document.title)).then(() => page.title()),
};
const gradio = {
  answers: page.locator("[data-testid=bot]"),
  prepare: () => page.locator("textarea").last().waitFor(),
  async ask(question) {
    await page.locator("textarea").last().fill(question);
    await page.keyboard.press("Enter");
  },
  title: () => page.title(),
};

const chat = { openWebUI, gradio }[name];
await chat.prepare();
const answers = [];
for (const question of questions) {
  await chat.ask(question);
  const answer = chat.answers.nth(answers.length);
  await answer.getByText(/\w\./).first().waitFor();
  await page.locator('[aria-label="Stop"]').waitFor({ state: "hidden" });
  answers.push((await answer.innerText()).trim());
}
const title = questions.length && await chat.title();
if (shot) await page.screenshot({ path: shot });
await browser.close();
console.log(JSON.stringify({ answers, title }));
