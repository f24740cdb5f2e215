// Tests every flow of the console in a real browser. run.py starts the services and this program.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { setTimeout as delay } from "node:timers/promises";
import { chromium } from "playwright-core";

const { only, password, ports, runtime, shots } = JSON.parse(process.argv[2]);
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const heaviest = 80 * 1024;
// The widths of the three layouts. Every page is checked at each, in light and dark.
const [desktop, tablet, phone] = [1280, 820, 390];
const layouts = [desktop, tablet, phone];
// Where every page has to fit, with the ends of the layouts.
const allWidths = [320, 390, 600, 761, 820, 960, 1160, 1280];
// The width of the flow that runs.
let width = desktop;
const today = new Date().toISOString().slice(0, 10);
const sixYearsAgo = `${Number(today.slice(0, 4)) - 6}${today.slice(4, 8)}01`;
const base = (ledger) => `http://console.localhost:${ports[ledger]}`;

const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium-headless-shell",
  args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync"],
});

// Waits for a service: run.py fills the largest ledger while the first tests run.
const starts = {};
const start = (ledger) => starts[ledger] ??= (async () => {
  const deadline = Date.now() + 300_000;
  while (!await fetch(`http://127.0.0.1:${ports[ledger]}/`).catch(() => null)) {
    assert.ok(Date.now() < deadline, `the service of the ledger "${ledger}" does not answer`);
    await delay(100);
  }
})();

// Opens a context, and checks that its pages log no error in the browser and send no request to another host.
async function open(ledger, options = {}) {
  await start(ledger);
  const colorScheme = width === tablet ? "dark" : "light";
  const context = await browser.newContext({ viewport: { width, height: 900 }, hasTouch: width < desktop, colorScheme, ...options });
  context.setDefaultTimeout(60_000);
  context.allowed = [];
  const page = await context.newPage();
  page.on("console", (message) => {
    const wanted = context.allowed.some((part) => message.text().includes(part));
    if (["error", "warning"].includes(message.type()) && !wanted) assert.fail(`the browser's console: ${message.text()}`);
  });
  page.on("pageerror", (error) => assert.fail(error));
  page.on("request", (request) => {
    const host = new URL(request.url()).host;
    if (!context.allowed.includes(host)) assert.equal(host, `console.localhost:${ports[ledger]}`, request.url());
  });
  page.base = base(ledger);
  return page;
}

async function signIn(page, path = "/") {
  await page.goto(page.base + path);
  await page.getByLabel("Operator password").fill(password);
  await page.getByRole("button", { name: "Sign in" }).click();
  await page.getByRole("button", { name: "Sign out" }).waitFor();
}

// Unfolds the filters if they are behind a button.
async function unfold(page) {
  const button = page.locator(".fold:not([open]) > summary");
  if (await button.isVisible()) await button.click();
}

// Sorts a table by a column: by its head or, if rows are cards, by a list of the columns.
async function sortBy(page, name) {
  if (width > phone) return page.locator(".cards thead").getByText(name, { exact: true }).click();
  await page.locator(".order > summary").click();
  await page.locator(".order").getByRole("link", { name, exact: true }).click();
}

async function apply(page, fill) {
  await unfold(page);
  await fill?.();
  await page.getByRole("button", { name: "Apply" }).click();
}

// Not from the page, so that no cookie is sent.
const complete = (key, content = "Say hello.", base = `http://localhost:${ports.empty}/v1`) => fetch(`${base}/chat/completions`, {
  method: "POST",
  headers: { authorization: `Bearer ${key}`, "content-type": "application/json" },
  body: JSON.stringify({ model: "adriaticum", messages: [{ role: "user", content }] }),
});

// Checks what is shown for accessibility, as it is now.
async function checkAccess(page, text, rules) {
  if (!await page.evaluate(() => "axe" in window)) await page.evaluate(axe);
  const violations = await page.evaluate(async (runOnly) => {
    // Rows of a table that differ in their texts only are checked once: the same rules would find the same in each. axe does
    // not judge the colour of a single character.
    const shapes = new Set();
    for (const row of document.querySelectorAll("tbody tr")) {
      const shape = row.outerHTML.replace(/>[^<]{2,}/g, ">xx").replace(/>[^<](?=<)/g, ">x").replace(/ (href|title|datetime)="[^"]*"/g, "");
      if (shapes.has(shape)) row.dataset.again = "";
      shapes.add(shape);
    }
    const { violations } = await window.axe.run({ exclude: "[data-again]" }, { resultTypes: ["violations"], runOnly });
    return violations.map((v) => `${v.id}: ${v.help} – ${v.nodes.map((n) => n.target).join("; ")}`);
  }, rules);
  assert.deepEqual(violations, [], text);
}

// Checks that what is shown fits at every width.
async function checkWidths(page, name) {
  const { width: own } = page.viewportSize();
  for (const width of allWidths) {
    await page.setViewportSize({ width, height: 900 });
    const { nameless, wide, cut, lines, rows } = await page.evaluate(() => ({
      // Some browsers forget that an element is part of a table if the style sheet displays it as something else.
      nameless: [...document.querySelectorAll("table, thead, tbody, tr, th, td")]
        .filter((element) => !element.role && !/^(table|none)/.test(getComputedStyle(element).display)).map((element) => element.outerHTML),
      wide: document.documentElement.scrollWidth,
      cut: [...document.querySelectorAll("body *")]
        .filter((element) => getComputedStyle(element).overflowX === "hidden" && !element.matches(".unseen")
          && element.scrollWidth > element.clientWidth).map((element) => element.outerHTML.slice(0, 200)),
      lines: new Set([...document.querySelectorAll("header li")].map((item) => item.offsetTop)).size,
      rows: new Set([...document.querySelectorAll(".filters :is(.choices, input, select, button)")]
        .filter((field) => field.offsetHeight > 0).map((field) => field.offsetTop + Math.floor(field.offsetHeight / 2) >> 4)).size,
    }));
    const text = `${name}, ${width}`;
    assert.deepEqual(nameless, [], `${text}: elements of a table without a role`);
    assert.ok(wide <= width, `${text}: it is ${wide} wide`);
    assert.deepEqual(cut, [], `${text}: content is cut off`);
    assert.ok(lines <= 1, `${text}: the navigation has ${lines} lines`);
    if (width >= 1160) assert.ok(rows <= 2, `${text}: ${rows} rows of filters`);
    if (shots && width === 320) await page.screenshot({ path: `${shots}/${name}-${width}.png`, fullPage: true });
  }
  await page.setViewportSize({ width: own, height: 900 });
}

// Checks what a flow shows, at its own layout, and takes a picture of it.
async function check(page, name) {
  const { width } = page.viewportSize();
  await checkAccess(page, `${name}, ${width}`);
  if (shots) await page.screenshot({ path: `${shots}/${name}-${width}.png`, fullPage: true });
  await checkWidths(page, name);
}

// How far apart two colours are in CIE Lab: the least of normal sight, protanopia and deuteranopia (Machado et al., 2009).
function leastDistance(one, other) {
  const sights = [
    [1, 0, 0, 0, 1, 0, 0, 0, 1],
    [0.152286, 1.052583, -0.204868, 0.114503, 0.786281, 0.099216, -0.003882, -0.048116, 1.051998],
    [0.367322, 0.860646, -0.227968, 0.280085, 0.672501, 0.047413, -0.01182, 0.04294, 0.968881],
  ];
  const linear = (value) => (value <= 10 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
  const lab = (colour, sight) => {
    const rgb = colour.map(linear);
    const [r, g, b] = [0, 3, 6].map((at) => Math.min(1, Math.max(0, sight[at] * rgb[0] + sight[at + 1] * rgb[1] + sight[at + 2] * rgb[2])));
    const root = (value) => (value > 0.008856 ? Math.cbrt(value) : 7.787 * value + 16 / 116);
    const [x, y, z] = [(0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047, 0.2126 * r + 0.7152 * g + 0.0722 * b,
      (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883].map(root);
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)];
  };
  return Math.min(...sights.map((sight) => {
    const [a, b] = [lab(one, sight), lab(other, sight)];
    return Math.hypot(...a.map((value, at) => value - b[at]));
  }));
}

const flows = {
  async "a wrong password, the right one, and back to the requested page"() {
    const page = await open("empty");
    page.context().allowed.push("401");
    await page.goto(page.base + "/usage?range=7d");
    assert.equal(new URL(page.url()).pathname, "/sign-in");
    // The field has the focus once the page is drawn, which may be after it is loaded.
    await page.locator("input:focus").waitFor();
    await page.keyboard.type("not the password");
    await page.keyboard.press("Enter");
    await page.getByRole("alert").filter({ hasText: "not the password" }).waitFor();
    await check(page, "flow-wrong-password");
    await page.getByLabel("Operator password").fill(password);
    await page.keyboard.press("Enter");
    await page.getByRole("heading", { name: "Usage", exact: true }).waitFor();
    assert.equal(page.url(), page.base + "/usage?range=7d");
    const [cookie, ...others] = await page.context().cookies();
    assert.ok(others.length === 0 && cookie.httpOnly && cookie.sameSite === "Lax");
    await page.getByRole("link", { name: "Audit" }).click();
    const signedIn = page.getByRole("row").filter({ hasText: "signed in" }).filter({ hasText: "127.0.0.1" });
    await signedIn.first().waitFor();
    await page.getByRole("button", { name: "Sign out" }).click();
    await page.getByRole("heading", { name: "Sign in" }).waitFor();
    await page.goto(page.base + "/keys");
    assert.equal(new URL(page.url()).pathname, "/sign-in");
  },

  async "a key: created, shown once, copied, used, changed, revoked"() {
    const page = await open("empty", { permissions: ["clipboard-read", "clipboard-write"] });
    await signIn(page);
    await page.getByRole("link", { name: /^Create (the first )?key$/ }).click();
    await page.getByRole("button", { name: "Create key" }).waitFor();
    await page.getByLabel("Concurrent requests").fill("0");
    await page.getByLabel("Name", { exact: true }).fill("x");
    page.context().allowed.push("400");
    await page.keyboard.press("Enter");
    await page.getByRole("alert").filter({ hasText: "Concurrent requests" }).waitFor();
    await check(page, "flow-wrong-field");
    assert.equal(await page.evaluate(() => document.activeElement.id), "concurrent");
    await page.getByLabel("Concurrent requests").fill("");
    await page.getByLabel("Name", { exact: true }).fill("<b>first</b> \"key\"");
    const expires = page.getByLabel("Expires", { exact: true });
    assert.equal(await page.getByLabel("Date or term of the expiry").locator("option").filter({ hasText: "in 90 days" }).count(), 1);
    await expires.fill("2126-01-01");
    await page.getByRole("button", { name: "Create key" }).click();
    const secret = await page.locator("#secret").textContent();
    assert.match(secret, /^adr_[0-9a-f]{48}$/);
    await check(page, "flow-new-key");
    await page.getByRole("button", { name: "Copy" }).first().click();
    assert.equal(await page.evaluate(() => navigator.clipboard.readText()), secret);
    assert.ok((await page.locator("#curl").textContent()).includes(`http://localhost:${ports.empty}/v1/chat/completions`));
    assert.equal((await complete(secret)).status, 200);
    await page.getByRole("link", { name: "Done" }).click();
    assert.ok(!(await page.content()).includes(secret));
    await page.getByText(`${secret.slice(0, 8)}…${secret.slice(-4)}`).waitFor();
    await page.getByRole("link", { name: "<b>first</b>" }).click();
    await page.getByLabel("Name", { exact: true }).fill(`second ${width}`);
    await page.getByLabel("metrics").check();
    await page.getByLabel("Concurrent requests").fill("7");
    await page.keyboard.press("Enter");
    await page.getByRole("status").filter({ hasText: `Saved second ${width}` }).waitFor();
    await check(page, "flow-saved");
    await page.getByRole("cell", { name: "7 concurrent" }).waitFor();
    await page.getByRole("link", { name: `second ${width}` }).click();
    assert.equal(await expires.inputValue(), "2126-01-01");
    await page.getByRole("link", { name: "Revoke key" }).click();
    await page.getByText("This can’t be undone").waitFor();
    assert.equal((await complete(secret)).status, 200);
    const heights = await page.locator(".buttons > :is(button, a)").evaluateAll((all) => all.map((e) => e.getBoundingClientRect().height));
    assert.equal(new Set(heights).size, 1, `the buttons have one height: ${heights}`);
    await page.getByRole("button", { name: "Revoke key" }).click();
    await page.getByRole("link", { name: /^Revoked/ }).click();
    await page.getByRole("link", { name: `second ${width}` }).click();
    await page.getByText("7 concurrent").waitFor();
    assert.equal(await page.getByRole("button", { name: "Save changes" }).count(), 0);
    await check(page, "flow-revoked");
    assert.equal((await complete(secret)).status, 401);
    await page.getByRole("link", { name: "Audit" }).click();
    await page.getByRole("row").filter({ hasText: "key revoked" }).filter({ hasText: `second ${width}` }).filter({ hasText: "127.0.0.1" }).waitFor();
    await page.getByText("concurrent: none → 7").first().waitFor();
  },

  async "the list of keys: filter, order and pages, with and without JavaScript"() {
    for (const javaScriptEnabled of [true, false]) {
      const page = await open("keys", { javaScriptEnabled });
      await signIn(page);
      const names = () => page.locator(".keys tbody th a").allTextContents();
      assert.equal((await names()).length, 50);
      await page.getByRole("link", { name: "Next" }).click();
      await page.getByText("Page 2 of 2").waitFor();
      assert.ok((await names()).length < 50);
      await unfold(page);
      await page.getByLabel("Filter").fill("WORKSTATION 0");
      await page.keyboard.press("Enter");
      await page.waitForURL(/q=WORKSTATION/);
      assert.equal((await names()).length, 9);
      await sortBy(page, "Name");
      await page.waitForURL(/sort=name/);
      assert.deepEqual(await names(), (await names()).toSorted());
      assert.equal((await names())[0], "workstation 01");
      const view = () => ["q", "sort"].map((name) => new URL(page.url()).searchParams.get(name)).join();
      const list = view();
      for (const link of ["Cancel", "Back to API keys"]) {
        await page.locator(".keys tbody th a").first().click();
        await page.getByRole("link", { name: link }).click();
        assert.equal(view(), list, "the filter and the order survive");
      }
      await page.goto(page.base + "/usage?range=90d");
      const key = page.getByLabel("Key", { exact: true });
      assert.ok(await page.locator("#keys option[value=\"workstation 01\"]").count() === 1);
      const searchFor = async (text) => {
        await apply(page, () => key.fill(text));
        await page.waitForURL((url) => url.searchParams.get("key") === text);
      };
      await searchFor("WORKSTATION 01");
      assert.equal(await key.inputValue(), "workstation 01");
      // Sent again as it is, it means the same key.
      await apply(page);
      await page.waitForURL(/key=workstation\+01/);
      assert.equal(await key.inputValue(), "workstation 01");
      await searchFor("workstation");
      await page.getByText(/ keys match/).getByRole("link", { name: "workstation 02" }).waitFor();
      await searchFor("nobody");
      await page.getByText("No key is named nobody").waitFor();
      assert.equal(await page.locator(".cards-row").count(), 0, "no figures of other keys");
      await page.goto(page.base + "/keys?sort=-requests");
      assert.equal((await names())[0], "billing service");
      await page.goto(page.base + "/audit");
      const first = await page.locator("tbody tr").first().textContent();
      await page.getByRole("link", { name: "Earlier changes" }).click();
      assert.notEqual(await page.locator("tbody tr").first().textContent(), first);
      await page.getByRole("link", { name: "Newest" }).click();
      await page.context().close();
    }
  },

  async "filters, and an address that can be shared"() {
    const page = await open("many");
    await signIn(page, "/usage");
    await unfold(page);
    await page.getByRole("link", { name: "90 days" }).click();
    const requests = async () => Number((await page.locator("dd strong").first().textContent()).replaceAll(",", ""));
    const all = await requests();
    assert.ok(all > 190_000, `${all}`);
    const card = (title) => page.locator(".cards-row > div").filter({ hasText: title });
    const duration = card("Duration, median");
    const rate = await card("Success rate").innerText();
    assert.match(await duration.innerText(), /Duration, median\s+[\d.,]+ m?s\s+p95 [\d.,]+ m?s, p99 [\d.,]+ m?s\s+of the newest 500 completions/);
    const titles = await page.locator(".cards-row dt").allTextContents();
    assert.deepEqual(titles, ["Requests", "Success rate", "Total tokens", "Duration, median"]);
    assert.deepEqual(await page.locator(".groups thead th").allTextContents(),
      ["Key", "Requests", "Succeeded", "Tokens in", "Tokens out", "Total tokens", "Share of tokens"]);
    const outcome = page.getByLabel("Outcome", { exact: true });
    await unfold(page);
    await outcome.focus();
    await page.keyboard.press("ArrowDown");
    assert.ok(await outcome.evaluate((select) => select === document.activeElement), "a choice by keyboard keeps the focus");
    await outcome.selectOption("inference_error");
    await page.getByRole("button", { name: "Apply" }).click();
    await page.waitForURL(/outcome=inference_error/);
    const failed = await requests();
    assert.ok(failed > 100 && failed < all / 20, `${failed}`);
    assert.match(await duration.innerText(), /of the newest 500 completions/);
    assert.equal(await card("Success rate").innerText(), rate, "an outcome changes the rows, not the base");
    const key = page.getByLabel("Key", { exact: true });
    await apply(page, () => key.fill("billing service"));
    await page.waitForURL(/key=billing/);
    assert.ok((await requests()) < failed);
    const shared = await open("many");
    await signIn(shared, page.url().slice(page.base.length));
    assert.equal(await shared.locator("dd strong").first().textContent(), await page.locator("dd strong").first().textContent());
    // The number of requests leads to them.
    await page.locator("dd strong a").first().click();
    await page.waitForURL(/requests\?.*key=key_.*outcome=inference_error/);
    assert.equal(await page.locator("tbody .badge.good").count(), 0);
    const ids = () => page.locator(".requests tbody td:nth-child(2) a").allTextContents();
    const newest = await ids();
    assert.equal(newest.length, 50);
    await page.getByRole("link", { name: "Earlier requests" }).click();
    await page.waitForURL(/before=/);
    const earlier = await ids();
    assert.ok(earlier.every((id) => !newest.includes(id)));
    await page.getByRole("link", { name: "Later requests" }).click();
    await page.waitForURL(/after=/);
    assert.deepEqual(await ids(), newest);
    await page.goto(page.base + "/usage?range=90d");
    await page.getByLabel("Groups").getByRole("link", { name: "bar" }).click();
    await page.waitForURL(/by=bar/);
    assert.equal(await page.locator("#figures tbody tr").count(), 90);
  },

  async "a bar's exact figures at the pointer and at the finger"() {
    const page = await open("many");
    await signIn(page, "/usage?range=30d&by=bar");
    assert.equal(await page.locator(".plot").count(), 2);
    for (const [chart, first, series] of [[0, 1, 3], [1, 4, 5]]) {
      const plot = page.locator(".plot").nth(chart);
      const svg = plot.locator("svg");
      await svg.scrollIntoViewIfNeeded();
      const box = await svg.boundingBox();
      // The middle of the last bar but three.
      const [x, y] = [box.x + (box.width * 26.5) / 30, box.y + box.height / 2];
      if (width < desktop) await page.touchscreen.tap(x, y);
      else await page.mouse.move(x, y);
      const tip = plot.locator(".tip");
      await tip.waitFor();
      const cells = await page.locator("#figures tbody tr").nth(26).locator("th, td").allTextContents();
      const shown = (await tip.textContent()).replace(/Open$/, "");
      assert.equal(await tip.getByRole("link", { name: "Open" }).count(), width < desktop ? 1 : 0);
      assert.match(page.url(), /range=30d&by=bar$/, "a tap opens nothing");
      // The date and the chart's columns: outcomes; tokens of four keys and the others.
      const figures = cells.slice(first, first + series);
      for (const text of [cells[0], ...figures]) assert.ok(shown.includes(text), `${shown} has ${text}`);
      const total = figures.reduce((sum, text) => sum + Number(text.replaceAll(",", "")), 0);
      assert.ok(shown.endsWith(`Total${total.toLocaleString("en-US")}`), shown);
      const [tipBox, name] = [await tip.boundingBox(), await plot.locator(".x i").nth(25).boundingBox()];
      assert.ok(tipBox.x >= 0 && tipBox.x + tipBox.width <= width, "it is on the screen");
      assert.ok(name.x < x && x - name.x < box.width / 15, "a label is at the bar it names");
      if (shots) await page.screenshot({ path: `${shots}/flow-tooltip-${chart}-${width}.png` });
      await page.locator("h1").click();
      await tip.waitFor({ state: "hidden" });
    }
  },

  async "a bar is as high as its figures, and opens its interval down to the requests"() {
    const page = await open("many");
    await signIn(page, "/usage?range=30d&by=bar");
    const rows = await page.locator("#figures tbody tr").evaluateAll((all) =>
      all.map((row) => [...row.cells].slice(1).map((cell) => Number(cell.textContent.replaceAll(",", "")))));
    for (const [chart, first, series] of [[0, 0, 3], [1, 3, 5]]) {
      const drawn = await page.locator(".plot").nth(chart).evaluate((plot) => {
        const { width, height } = plot.querySelector("svg").viewBox.baseVal;
        const bars = document.querySelectorAll("#figures tbody tr").length;
        return [...plot.querySelectorAll("path.f")].map((path) => {
          const heights = new Array(bars).fill(0);
          for (const [, x, from, to] of path.getAttribute("d").matchAll(/M([\d.]+) ([\d.]+)V(-?[\d.]+)/g)) {
            heights[Math.floor(Number(x) / (width / bars))] = (Number(from) - Number(to)) / height;
          }
          return heights;
        });
      });
      assert.equal(drawn.length, series);
      const sums = rows.map((row) => row.slice(first, first + series).reduce((sum, value) => sum + value, 0));
      // What one request or token is high, by the highest bar.
      const highest = sums.indexOf(Math.max(...sums));
      const unit = drawn.reduce((sum, heights) => sum + heights[highest], 0) / sums[highest];
      assert.ok(unit > 0);
      rows.forEach((row, bar) => drawn.forEach((heights, number) => {
        const wanted = row[first + number] * unit;
        assert.ok(Math.abs(heights[bar] - wanted) < 0.002, `chart ${chart}, bar ${bar}, series ${number}: ${heights[bar]}, not ${wanted}`);
      }));
    }
    // A range that cuts two hours has the same requests in its card, its bars, its list and its export.
    const day = new Date(Date.now() - 5 * 86_400_000).toISOString().slice(0, 10);
    const cut = `from=${day}T13:30&to=${day}T15:15`;
    await page.goto(`${page.base}/usage?${cut}&by=bar`);
    const inCard = Number(await page.locator("dd strong").first().textContent());
    const table = await page.locator("#figures tbody tr").evaluateAll((all) => all.map((row) => [...row.cells].map((cell) => cell.textContent)));
    assert.deepEqual(table.map(([label]) => label.split(" ").pop()), ["13:30–14:00", "14:00–15:00", "15:00–15:15"]);
    assert.equal(table.reduce((sum, row) => sum + row.slice(1, 4).reduce((all, text) => all + Number(text), 0), 0), inCard);
    assert.ok(inCard > 20, `${inCard}`);
    assert.equal(await page.locator(".plot").first().locator(".pale").count(), 2);
    await page.goto(`${page.base}/requests?${cut}`);
    const [file] = await Promise.all([page.waitForEvent("download"), page.getByRole("link", { name: "CSV", exact: true }).click()]);
    assert.equal(readFileSync(await file.path(), "utf8").match(/chatcmpl_/g).length, inCard);
    await page.goto(`${page.base}/usage?range=30d&by=bar`);
    const last = page.locator("#figures tbody tr").last();
    assert.match(await last.locator("th").textContent(), /, so far$/);
    assert.equal(await page.locator("svg .pale").count(), 2);
    const clickBar = async (bar, bars) => {
      const svg = page.locator(".plot svg").first();
      await svg.scrollIntoViewIfNeeded();
      const box = await svg.boundingBox();
      const [x, y] = [box.x + (box.width * (bar + 0.5)) / bars, box.y + box.height / 2];
      if (width === desktop) return page.mouse.click(x, y);
      await page.touchscreen.tap(x, y);
      await page.locator(".tip").first().getByRole("link", { name: "Open" }).click();
    };
    await clickBar(10, 30);
    await page.waitForURL(/range=\d{4}-\d\d-\d\d(&|$)/);
    assert.equal(await page.locator("#figures tbody tr").count(), 24, "a day has its hours, 20 days later too");
    await clickBar(12, 24);
    await page.waitForURL(/usage\?.*range=.*T12/);
    assert.equal(await page.locator("#figures tbody tr").count(), 60, "an hour has its minutes");
    await clickBar(30, 60);
    await page.waitForURL(/requests\?.*range=.*T12/);
    await page.getByRole("heading", { name: "Requests", exact: true }).waitFor();
    await unfold(page);
    await page.getByLabel("From").fill(`${today}T00:00`);
    await page.getByLabel("to", { exact: true }).fill(`${today}T00:30`);
    await page.getByRole("button", { name: "Apply" }).click();
    await page.waitForURL(/to=.*T00%3A30/);
  },

  async "filters are folded away behind what is set, in words"() {
    for (const javaScriptEnabled of [true, false]) {
      const page = await open("many", { javaScriptEnabled });
      await signIn(page, "/usage?range=7d");
      const button = page.locator(".fold > summary");
      const outcome = page.getByLabel("Outcome", { exact: true });
      assert.equal(await button.textContent(), "Filters: 7 days");
      assert.equal(await button.isVisible(), width < desktop);
      assert.equal(await outcome.isVisible(), width === desktop);
      await apply(page, async () => {
        await page.getByLabel("Key", { exact: true }).fill("billing service");
        await outcome.selectOption("failed");
      });
      await page.waitForURL(/outcome=failed/);
      assert.equal(await button.textContent(), "Filters: 7 days, key billing service, errors");
      await page.goto(page.base + "/requests?from=2026-01-02&to=2026-01-03&cause=status_500&least=5&most=900");
      assert.equal(await button.textContent(), "Filters: 2026-01-02 to 2026-01-03, status_500, at least 5 ms, at most 900 ms");
      await page.context().close();
    }
  },

  async "lists are tables from 761 px on, names end after two lines, and what can be clicked has the pointer"() {
    const page = await open("keys");
    await signIn(page, "/keys/new");
    const name = `${width} ${"a name as long as a name may be ".repeat(2)}`.slice(0, 64).trim();
    await page.getByLabel("Name", { exact: true }).fill(name);
    await page.getByRole("button", { name: "Create key" }).click();
    await page.locator("#secret").waitFor();
    await page.goto(page.base + "/keys");
    const link = page.locator(".keys tbody th a").first();
    assert.equal(await link.textContent(), name);
    const lines = await link.evaluate((link) => link.clientHeight / parseFloat(getComputedStyle(link).lineHeight));
    assert.ok(lines < 2.2, `${lines} lines`);
    await link.hover();
    const isCut = await link.evaluate((link) => link.scrollHeight > link.clientHeight + 1);
    assert.equal(await link.getAttribute("title"), isCut ? name : null);
    if (width === desktop) assert.ok(isCut, "the column is narrow");
    for (const [path, highest] of [["/keys", 4600], ["/requests?range=90d", 3600], ["/audit", 3600]]) {
      await page.goto(page.base + path);
      assert.equal(await page.locator("tbody tr").count(), 50);
      const height = await page.evaluate(() => document.documentElement.scrollHeight);
      assert.equal(await page.locator(".cards thead").isVisible(), width > phone);
      if (width > phone) assert.ok(height < highest, `${path} is ${height} high`);
    }
    if (width < desktop) return;
    await page.goto(page.base + "/usage?range=90d");
    for (const clicked of [".plot svg", "select", "button", ".choices a"]) {
      const cursors = await page.locator(clicked).evaluateAll((all) => all.map((element) => getComputedStyle(element).cursor));
      assert.ok(cursors.length > 0 && cursors.every((cursor) => cursor === "pointer"), `${clicked}: ${cursors}`);
    }
  },

  async "series can be told apart with red-green blindness"() {
    const page = await open("many");
    await signIn(page, "/usage?range=30d");
    for (const colorScheme of ["light", "dark"]) {
      await page.emulateMedia({ colorScheme });
      const colours = await page.evaluate(() => {
        const of = (name) => {
          const probe = document.body.appendChild(Object.assign(document.createElement("i"), { className: name }));
          const colour = getComputedStyle(probe).color.match(/\d+/g).slice(0, 3).map(Number);
          probe.remove();
          return colour;
        };
        return [["ok", "refused", "failed"], ["k0 s0", "k1 s0", "k2 s0", "k3 s0", "k4 s0", "k5 s0", "others"]].map((group) => group.map((name) => [name, of(name)]));
      });
      for (const group of colours) {
        for (const [one, a] of group) {
          for (const [other, b] of group) if (one < other) assert.ok(leastDistance(a, b) > 20, `${colorScheme}: ${one} and ${other} are ${leastDistance(a, b)} apart`);
        }
      }
    }
  },

  async "a session that ended says so, and the page after it is the one that was asked for"() {
    const page = await open("empty");
    await signIn(page, "/keys/new");
    await page.getByLabel("Name", { exact: true }).fill("never saved");
    const cookies = await page.context().cookies();
    await page.context().addCookies(cookies.map((cookie) => ({ ...cookie, value: "0".repeat(64) })));
    await page.getByRole("button", { name: "Create key" }).click();
    await page.getByText("Your session ended, and the change was not saved. Sign in, then make it again.").waitFor();
    await check(page, "flow-session-ended");
    await page.getByLabel("Operator password").fill(password);
    await page.keyboard.press("Enter");
    await page.getByRole("button", { name: "Create key" }).waitFor();
    assert.equal(await page.getByLabel("Name", { exact: true }).inputValue(), "");
    page.context().allowed.push("404");
    await page.goto(page.base + "/nothing");
    await page.getByRole("link", { name: "Status" }).waitFor();
  },

  async "the table by key is sorted, the list is filtered by duration, and months are chosen, without JavaScript too"() {
    for (const javaScriptEnabled of [true, false]) {
      const page = await open("many", { javaScriptEnabled });
      await signIn(page, "/usage?range=90d");
      const names = () => page.locator(".groups tbody th").allTextContents();
      assert.equal((await names())[0], "billing service");
      await sortBy(page, "Requests");
      await page.waitForURL(/sort=-requests/);
      const first = await names();
      await sortBy(page, "Requests");
      await page.waitForURL(/sort=requests/);
      assert.deepEqual(await names(), first.toReversed());
      await page.getByLabel("Groups").getByRole("link", { name: "outcome" }).click();
      await page.waitForURL(/by=outcome/);
      assert.equal((await names())[0], "succeeded");
      await page.getByLabel("Groups").getByRole("link", { name: "day" }).click();
      await page.waitForURL(/by=day/);
      assert.equal((await names())[0], today);
      await page.goto(page.base + "/requests?range=90d");
      await apply(page, () => page.getByLabel("Took at least").fill("3000"));
      await page.waitForURL(/least=3000/);
      const times = await page.locator(".requests tbody td:nth-child(8)").allTextContents();
      // One of 30 requests took so long: 2,000 have dozens of them.
      assert.ok(times.length > 15 && times.every((time) => / s$/.test(time) && parseFloat(time) >= 3), times.join());
      await apply(page, () => page.getByLabel("Took at least").fill("4000000"));
      await page.getByText("None matches").or(page.getByText("so far.")).waitFor();
      await page.getByRole("link", { name: "Figures" }).click();
      await unfold(page);
      await page.getByRole("link", { name: "Last month" }).click();
      await page.getByLabel("Groups").getByRole("link", { name: "bar" }).click();
      await page.waitForURL(/by=bar/);
      const days = await page.locator("#figures tbody tr").count();
      assert.ok(days >= 28 && days <= 31, `${days}`);
      await page.context().close();
    }
  },

  async "a request is found by the id in an error message"() {
    const page = await open("many");
    await signIn(page, "/requests?range=90d&outcome=inference_error");
    const id = (await page.locator(".requests a").first().getAttribute("href")).match(/chatcmpl_\w+/)[0];
    await page.getByPlaceholder("Find a request").fill(`${"A long message. ".repeat(240)}{"request_id": "${id}"}`);
    await page.keyboard.press("Enter");
    await page.getByRole("heading", { name: id }).waitFor();
    await page.getByText("The runtime gave no usable answer").waitFor();
    page.context().allowed.push("404");
    await page.goto(page.base + "/requests/find?id=nonsense");
    await page.getByRole("heading", { name: "No such request" }).waitFor();
  },

  async "exports contain what the page shows"() {
    const page = await open("many");
    await signIn(page, "/usage?range=90d");
    const shown = Number((await page.locator("dd strong").first().textContent()).replaceAll(",", ""));
    const download = async (name) => {
      const [file] = await Promise.all([page.waitForEvent("download"), page.getByRole("link", { name, exact: true }).click()]);
      return [file.suggestedFilename(), readFileSync(await file.path(), "utf8")];
    };
    const [totalsName, totals] = await download("CSV");
    assert.match(totalsName, /^adriaticum-totals-.*\.csv$/);
    assert.ok(totals.startsWith("\ufeff"));
    const [head, ...lines] = totals.trim().split("\r\n").map((line) => line.split(","));
    assert.equal(head[3], '"requests"');
    const sum = lines.reduce((all, line) => all + Number(line[3].replaceAll('"', "")), 0);
    assert.ok(Math.abs(sum - shown) < 200, `${sum} of ${shown}`);
    // More than 10,000 requests are for the command, which the page shows.
    page.context().allowed.push("400");
    await page.getByRole("link", { name: "the requests" }).click();
    await page.getByRole("link", { name: "CSV", exact: true }).click();
    await page.getByRole("heading", { name: "The export is too long" }).waitFor();
    await page.getByText("adriaticum usage list ").waitFor();
    await page.goto(page.base + "/usage?range=24h");
    const shownOfADay = Number((await page.locator("dd strong").first().textContent()).replaceAll(",", ""));
    await page.getByRole("link", { name: "the requests" }).click();
    const [file, text] = await download("CSV");
    assert.match(file, /^adriaticum-usage-.*\.csv$/);
    assert.ok(text.startsWith("\ufeff"));
    const exported = text.trim().split("\r\n").length - 1;
    assert.ok(Math.abs(exported - shownOfADay) < 200, `${exported} of ${shownOfADay}`);
  },

  async "a page of another site changes nothing, and its links open the console"() {
    const page = await open("empty");
    page.context().allowed.push("403", "evil.localhost:" + ports.empty, "404");
    await signIn(page, "/keys/new");
    await page.route("**/evil", (route) => route.fulfill({ contentType: "text/html", body:
      `<form method=post action="${page.base}/keys"><input name=name value=foreign><input name=once value="${"0".repeat(32)}">
       <input name=permission value=completions><button>Win</button></form><a href="${page.base}/usage?range=7d">Look</a>` }));
    await page.goto(`http://evil.localhost:${ports.empty}/evil`);
    await page.getByRole("button").click();
    await page.getByRole("heading", { name: "The form came from elsewhere" }).waitFor();
    await page.goto(`http://evil.localhost:${ports.empty}/evil`);
    await page.getByRole("link").click();
    await page.getByRole("heading", { name: "Usage", exact: true }).waitFor();
    assert.equal(page.url(), page.base + "/usage?range=7d");
    await page.goto(page.base + "/keys");
    assert.ok(!(await page.content()).includes("foreign"));
  },

  async "everything works without JavaScript"() {
    const page = await open("empty", { javaScriptEnabled: false });
    await signIn(page, "/keys/new");
    await page.getByLabel("Name", { exact: true }).fill("without a script");
    await page.getByLabel("Expires", { exact: true }).fill("2126-01-01");
    await page.getByRole("button", { name: "Create key" }).click();
    assert.match(await page.locator("#secret").textContent(), /^adr_/);
    await page.goto(page.base + "/usage");
    await apply(page, () => page.getByLabel("Outcome", { exact: true }).selectOption("ok"));
    assert.match(page.url(), /outcome=ok/);
    await page.goto(page.base + "/status");
    await page.getByText("As of").waitFor();
  },

  async "status shows a runtime that failed and a greedy key"() {
    const page = await open("empty");
    await signIn(page, "/keys/new");
    const name = `greedy ${width}`;
    await page.getByLabel("Name", { exact: true }).fill(name);
    await page.getByLabel("Concurrent requests").fill("1");
    await page.getByRole("button", { name: "Create key" }).click();
    const secret = await page.locator("#secret").textContent();
    // The queue knows the key of a completed request.
    assert.equal((await complete(secret)).status, 200);
    // One failure is no outage; several are, on every page at once, until it answers.
    const dot = page.locator("header .dot.bad");
    for (const failures of [1, 2, 3]) {
      assert.equal((await complete(secret, "Fail.")).status, 502);
      await page.goto(page.base + "/keys");
      assert.equal(await dot.count(), failures === 3 ? 1 : 0, `${failures} failures`);
    }
    assert.ok(await dot.isVisible());
    const badge = page.locator(".lead .badge");
    await page.goto(page.base + "/status");
    assert.equal(await badge.textContent(), "failing");
    await check(page, "flow-failing");
    assert.equal((await complete(secret)).status, 200);
    await page.goto(page.base + "/usage");
    assert.equal(await dot.count(), 0);
    assert.equal((await complete("", "Hold.", runtime)).status, 200);
    const waiting = [1, 2, 3].map(() => complete(secret, "Wait."));
    const rowOf = (text) => page.getByRole("row").filter({ hasText: text });
    // The key, waiting, the longest wait, running, limit, shed.
    const isQueued = async () => {
      await page.goto(page.base + "/status");
      const cells = await rowOf(name).getByRole("cell").allTextContents();
      return cells.length === 5 && [0, 2, 3, 4].map((at) => cells[at]).join() === "2,1,1,0";
    };
    const deadline = Date.now() + 60_000;
    while (!await isQueued()) assert.ok(Date.now() < deadline, await page.locator("main").innerText());
    assert.match(await page.locator(".runtimes td").last().textContent(), /\d\d:\d\d:\d\d: .*500/);
    assert.equal((await complete("", "Go on.", runtime)).status, 200);
    for (const reply of await Promise.all(waiting)) assert.equal(reply.status, 200);
    await page.goto(page.base + "/status");
    await page.getByText("Completions can be run.").waitFor();
    for (const fact of ["Database", "Last checkpoint"]) await page.getByText(fact, { exact: true }).waitFor();
    await check(page, "flow-status");
  },

  async "every page can be used with the keyboard alone"() {
    const page = await open("one");
    await signIn(page);
    await page.keyboard.press("Tab");
    assert.equal(await page.evaluate(() => document.activeElement.textContent), "Skip to the content");
    const seen = new Set();
    for (let step = 0; step < 40; step += 1) {
      await page.keyboard.press("Tab");
      seen.add(await page.evaluate(() => document.activeElement.textContent.trim().replace(/^Filters.*/, "Filters")));
    }
    // A phone has a button in place of the filters, and in these a list of the orders in place of the table's head.
    const own = width > phone ? ["Apply", "Name", "Tokens, 30\u00a0d"] : ["Filters"];
    for (const name of ["API Keys", "Usage", "Requests", "Status", "Audit", "Sign out", "Create key", "billing service", ...own]) {
      assert.ok(seen.has(name), name);
    }
  },
};

// Flows that compare the drawn page with figures run at the tablet's width too, and in dark.
const drawn = new Set(["filters, and an address that can be shared", "status shows a runtime that failed and a greedy key",
  "the table by key is sorted, the list is filtered by duration, and months are chosen, without JavaScript too", "the list of keys: filter, order and pages, with and without JavaScript",
  "a bar's exact figures at the pointer and at the finger", "a bar is as high as its figures, and opens its interval down to the requests",
  "filters are folded away behind what is set, in words",
  "lists are tables from 761 px on, names end after two lines, and what can be clicked has the pointer"]);
// Flows in which nothing depends on the layout.
const independent = new Set(["series can be told apart with red-green blindness", "exports contain what the page shows",
  "a page of another site changes nothing, and its links open the console"]);
for (const name of [...drawn, ...independent]) assert.ok(name in flows, name);

// Loads every page once, and checks it at all layouts, in light and dark.
async function look(ledger) {
  // Without motion, a link has its colour at once when the scheme changes.
  const page = await open(ledger, { viewport: { width: desktop, height: 900 }, hasTouch: false, reducedMotion: "reduce" });
  const checkPage = async (name) => {
    for (const colorScheme of ["light", "dark"]) {
      await page.emulateMedia({ colorScheme });
      for (const width of layouts) {
        await page.setViewportSize({ width, height: 900 });
        // A tablet has the filters folded, a phone unfolded.
        await page.locator(".fold").evaluateAll((all, open) => all.forEach((fold) => (fold.open = open)), width === phone);
        const text = `${ledger}-${name}-${colorScheme}`;
        // The second scheme needs the rules about its colours only.
        await checkAccess(page, `${text}, ${width}`, colorScheme === "dark" ? ["color-contrast", "link-in-text-block"] : undefined);
        if (shots) await page.screenshot({ path: `${shots}/${text}-${width}.png`, fullPage: true });
      }
    }
    await page.emulateMedia({ colorScheme: "light" });
    await page.setViewportSize({ width: desktop, height: 900 });
    await checkWidths(page, `${ledger}-${name}-light`);
  };
  page.context().allowed.push("404");
  // The style sheet, the script and the icon are loaded once, and count for every page.
  const assets = new Map();
  page.on("response", async (response) => {
    if (response.url().includes("/assets/")) assets.set(response.url(), Number(response.headers()["content-length"]));
  });
  await page.goto(page.base + "/sign-in");
  await checkPage("sign-in");
  await signIn(page);
  const pages = { keys: "/keys", "keys-filtered": "/keys?q=a&sort=-tokens", "keys-none": "/keys?q=nothing", "keys-revoked": "/keys?state=revoked",
    "new-key": "/keys/new", audit: "/audit", usage: "/usage", "usage-90d": "/usage?range=90d", "usage-figures": "/usage?range=30d&by=bar", "usage-7d": "/usage?range=7d&by=day", "usage-outcome": "/usage?range=90d&by=outcome",
    "usage-1h": "/usage?range=1h", "usage-month": "/usage?range=month", "usage-six-years": `/usage?from=${sixYearsAgo}&to=${today}`,
    requests: "/requests?range=90d", "requests-slow": "/requests?range=90d&least=5000", "usage-day": `/usage?from=${today}T00:00&to=${today}T12:00`, "audit-keys": "/audit?about=keys", status: "/status", missing: "/requests/find?id=x", nothing: "/nothing" };
  // The other ledgers differ in what a page is empty of or has fifty of, not in its range.
  const others = { empty: ["keys", "new-key", "audit", "usage", "requests", "status", "missing", "nothing"], one: ["keys", "usage", "usage-1h", "requests"],
    keys: ["keys", "keys-filtered", "keys-none", "audit", "usage-90d", "requests"] };
  const wanted = Object.entries(pages).filter(([name]) => (others[ledger] ?? [name]).includes(name));
  const tooHeavy = [];
  for (const [name, path] of wanted) {
    const response = await page.goto(page.base + path, { waitUntil: "load" });
    const weight = [...assets.values()].reduce((sum, size) => sum + size, (await response.body()).length);
    assert.ok(assets.size >= 2, name);
    if (weight >= heaviest) tooHeavy.push(`${name} weighs ${weight}`);
    heavy = Math.max(heavy, weight);
    // While checks run, the page loads itself again.
    await checkPage(name);
  }
  const story = page.locator(".requests tbody a").first();
  await page.goto(page.base + "/requests?range=90d");
  if (ledger !== "keys" && await story.count()) {
    await story.click();
    await checkPage("request");
  }
  await page.goto(page.base + "/keys");
  const key = page.locator(".keys tbody th a").first();
  if (await key.count()) {
    await key.click();
    await checkPage("key");
    await page.getByRole("link", { name: "Revoke key" }).click();
    await checkPage("revoke");
  }
  assert.deepEqual(tooHeavy, [], ledger);
  await page.context().close();
}
let heavy = 0;

let failures = 0;
async function attempt(name, work) {
  if (!new RegExp(only).test(name)) return;
  const began = Date.now();
  try {
    await work();
    console.log(`ok    ${name} (${((Date.now() - began) / 1000).toFixed(1)} s)`);
  } catch (error) {
    failures += 1;
    console.log(`FAIL  ${name}\n${error.stack}`);
  }
}
process.on("unhandledRejection", (error) => { failures += 1; console.log(`FAIL  ${error.stack}`); });
process.on("uncaughtException", (error) => { failures += 1; console.log(`FAIL  ${error.stack}`); });

const lookAt = (ledger) => attempt(`pages, ${ledger}`, () => look(ledger));

async function runFlows() {
  for (width of layouts) {
    for (const [name, flow] of Object.entries(flows)) {
      if (width === desktop || (width === tablet ? drawn.has(name) : !independent.has(name))) await attempt(`${name}, ${width}`, flow);
    }
  }
}

// Both halves take about as long. The ledgers "empty" and "one" are looked at before a flow changes them. run.py fills the
// ledger "many" meanwhile.
async function lookAtFew() {
  await lookAt("empty");
  await lookAt("one");
}
async function lookAtMany() {
  await lookAt("keys");
  await lookAt("many");
}
await Promise.all([lookAtFew().then(runFlows), lookAtMany()]);
console.log(`the heaviest page: ${heavy} bytes with its style sheet, script and icon`);
await browser.close();
process.exit(failures ? 1 : 0);
