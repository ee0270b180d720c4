"use strict";
// Draws what the page's JSON holds. Every text of it is written as text: nothing here makes HTML of a string.
(() => {
  const NARROW = 640;  // pixels: a phone
  const MARGIN = 400;  // pixels above and below the screen that are drawn too
  const isNarrow = () => window.innerWidth <= NARROW;
  // Without plotly's button that uploads a chart: what a log holds stays here.
  const plotConfig = () => ({ responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "", displayModeBar: isNarrow() ? false : "hover",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] });
  const root = document.documentElement;
  const element = id => document.getElementById(id);
  let content = JSON.parse(element("content").textContent);
  const tables = new Map();

  function make(name, text, attributes = {}) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }

  // Dark and light

  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  let chosenTheme = null;
  try { chosenTheme = localStorage.getItem("lightning_taco_theme"); } catch { /* a file may have no storage */ }

  function paintTheme() {
    const isDark = chosenTheme ? chosenTheme === "dark" : prefersDark.matches;
    root.dataset.theme = isDark ? "dark" : "light";
    element("theme").textContent = isDark ? "Light theme" : "Dark theme";
  }

  function color(name) { return getComputedStyle(root).getPropertyValue(name).trim(); }

  // Plots

  function themed(layout) {
    const axis = { gridcolor: color("--grid"), linecolor: color("--line"), zerolinecolor: color("--line") };
    const made = { ...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: color("--ink"), size: isNarrow() ? 11 : 13, family: getComputedStyle(document.body).fontFamily },
      hoverlabel: { bgcolor: color("--panel"), bordercolor: color("--line"), font: { color: color("--ink") },
        align: "left", namelength: isNarrow() ? 18 : -1 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: color("--subtle"), activecolor: color("--accent") },
      shapes: (layout.shapes || []).map(shape => ({ ...shape, line: { color: color("--ink"), ...shape.line } })) };
    for (const name of Object.keys(made)) {
      if (/^[xy]axis\d*$/.test(name)) made[name] = { ...axis, ...made[name] };
    }
    if (isNarrow()) made.margin = { ...made.margin, l: 44, r: 8 };
    return made;
  }

  function percent(share) {
    const number = 100 * share;
    return (number === 0 ? "0" : number.toPrecision(3).replace(/\.?0+$/, "").replace(/\.?0+e/, "e")) + "%";
  }

  // Errors span decades: their logarithms are drawn, and the true numbers are in the text of each cell.
  function heat(figure) {
    const [cells, marks] = figure.data;
    const { sites, columns } = figure.layout.meta;
    let low = Infinity, high = 0;
    for (const row of cells.z) for (const value of row) {
      if (value > 0) { low = Math.min(low, value); high = Math.max(high, value); }
    }
    if (high === 0) low = high = 1;
    if (low === high) { low /= 1.5; high *= 1.5; }
    const z = cells.z.map(row => row.map(value => value === null ? null : Math.log10(Math.max(value, low))));
    const text = cells.z.map((row, site) => row.map((value, column) =>
      value === null ? "" : `${sites[site]}<br>${columns[column]}: ${percent(value)}`));
    const ticks = [];
    for (let exponent = Math.floor(Math.log10(low)); exponent <= Math.log10(high); exponent++) {
      for (const digit of high / low > 300 ? [1] : [1, 2, 5]) {
        const value = digit * 10 ** exponent;
        if (value >= low && value <= high) ticks.push(value);
      }
    }
    if (ticks.length < 2) ticks.splice(0, ticks.length, low, high);
    const bar = { tickvals: ticks.map(Math.log10), ticktext: ticks.map(percent), outlinewidth: 0,
      title: { text: "relative error", side: isNarrow() ? "top" : "right" },
      ...(isNarrow() ? { orientation: "h", y: 1, yanchor: "bottom", thickness: 10, len: 1 } : { thickness: 14 }) };
    const layout = { ...figure.layout, yaxis: { ...figure.layout.yaxis } };
    if (isNarrow()) {
      layout.yaxis.showticklabels = false;
      layout.margin = { ...layout.margin, t: 70 };
    }
    return { data: [{ ...cells, z, text, zmin: Math.log10(low), zmax: Math.log10(high), colorbar: bar }, marks], layout };
  }

  function drawFigure(id) {
    const plot = element(`plot-${id}`);
    let figure = content.figures[id];
    if (!figure) return Promise.resolve();
    if (id === "error") figure = heat(figure);
    return Plotly.react(plot, figure.data, themed(figure.layout), plotConfig());
  }

  // Tables

  class SortedTable {
    constructor(id) {
      this.holder = element(`table-${id}`);
      this.search = element(`search-${id}`);
      this.count = element(`count-${id}`);
      this.body = make("tbody");
      this.names = "";
      this.sorted = null;
      if (this.search) this.search.addEventListener("input", () => this.show());
    }

    fill(table) {
      this.rows = table.rows;
      this.note = table.note;
      const names = JSON.stringify(table.columns);
      if (names !== this.names) {  // else the heads stay, and with them the reader's focus
        this.names = names;
        this.columns = table.columns;
        this.sorted = null;
        this.holder.replaceChildren(this.build());
      }
      this.show();
    }

    build() {
      const table = make("table");
      const head = make("tr");
      this.heads = this.columns.map(([name, isNumber], index) => {
        const cell = make("th", undefined, { scope: "col", "aria-sort": "none" });
        if (isNumber) cell.className = "number";
        const button = make("button", name, { type: "button" });
        button.addEventListener("click", () => this.sortBy(index));
        cell.append(button);
        head.append(cell);
        return cell;
      });
      const top = make("thead");
      top.append(head);
      table.append(top, this.body);
      return table;
    }

    sortBy(index) {
      const isNumber = this.columns[index][1];
      const falls = this.sorted && this.sorted.index === index ? !this.sorted.falls : isNumber;
      this.sorted = { index, falls };
      this.heads.forEach((cell, place) =>
        cell.setAttribute("aria-sort", place !== index ? "none" : falls ? "descending" : "ascending"));
      this.show();
    }

    show() {
      const words = (this.search ? this.search.value : "").toLowerCase().split(/\s+/).filter(Boolean);
      let rows = this.rows.filter(row => {
        const text = row.map(cell => cell[0]).join(" ").toLowerCase();
        return words.every(word => text.includes(word));
      });
      if (this.sorted) {
        const { index, falls } = this.sorted;
        const order = (a, b) => typeof a === "number" && typeof b === "number" ? a - b :
          String(a).localeCompare(String(b), undefined, { numeric: true });
        rows = [...rows].sort((a, b) => (falls ? -1 : 1) * order(a[index][1], b[index][1]));
      }
      const scroll = this.holder.scrollTop;
      this.body.replaceChildren(...rows.map(row => this.row(row)));
      this.holder.scrollTop = scroll;
      const sentence = `${rows.length} of ${this.rows.length} rows. ${this.note}`.trim();
      if (this.count && this.count.textContent !== sentence) this.count.textContent = sentence;
    }

    row(cells) {
      const row = make("tr");
      cells.forEach(([text], index) => {
        const [name, isNumber] = this.columns[index];
        const kind = isNumber ? "number" : `text ${name.replace(/\W+/g, "-").replace(/-$/, "")}`;
        row.append(make("td", text, { class: kind }));
      });
      return row;
    }
  }

  function fillTable(id) {
    const table = content.tables[id];
    const block = element(`block-${id}`);
    block.hidden = !table;
    const sentence = block.parentElement.querySelector(".without-table");
    if (sentence) sentence.hidden = Boolean(table);
    if (!table) return;
    if (!tables.has(id)) tables.set(id, new SortedTable(id));
    tables.get(id).fill(table);
  }

  // The numbers to choose from

  const chooser = element("choice");

  function fillChoices() {
    const tags = content.choices.lines.map(line => line.tag);
    const known = [...chooser.options].map(option => option.value);
    if (JSON.stringify(tags) !== JSON.stringify(known)) {
      const chosen = chooser.value;
      chooser.replaceChildren(...tags.map(tag => make("option", tag, { value: tag })));
      if (tags.includes(chosen)) chooser.value = chosen;
    }
    const left = content.choices.num_left_out;
    element("choice-note").textContent = left ? `${left} more are in the log.` : "";
  }

  function drawChoice() {
    const line = content.choices.lines.find(each => each.tag === chooser.value);
    if (!line) return Promise.resolve();
    const layout = { ...content.choices.layout, uirevision: line.tag, showlegend: false };
    return Plotly.react(element("plot-choice"), line.data, themed(layout), plotConfig());
  }

  // The whole page

  function pairs(rows) {
    const list = make("dl");
    for (const [name, value] of rows) list.append(make("dt", name), make("dd", value));
    return list;
  }

  function breakable(text) { return text.replace(/[./_]/g, "$&\u200b"); }  // long names wrap between their parts

  function fillTexts() {
    document.title = content.title;
    element("title").textContent = content.title;
    element("subtitle").textContent = content.subtitle;
    element("notes").hidden = content.notes.length === 0;
    element("notes").replaceChildren(...content.notes.map(note => make("li", note)));
    element("cards").replaceChildren(...content.cards.map(card => {
      const box = make("div");
      const value = make("dd");
      value.append(make("div", card.value, { class: "value" }), make("div", breakable(card.detail), { class: "detail" }));
      box.append(make("dt", card.label), value);
      return box;
    }));
    element("settings").replaceChildren(...content.settings.map(([title, rows]) => {
      const box = make("div");
      box.append(make("h3", title), pairs(rows));
      return box;
    }));
    const files = element("files");
    const names = JSON.stringify(content.files);
    if (files.dataset.shown !== names) {
      files.dataset.shown = names;
      files.replaceChildren(...Object.entries(content.files).map(([name, text]) => {
        const box = make("details");
        box.append(make("summary", name), make("pre", text, { tabindex: "0" }));
        return box;
      }));
    }
    element("nav").replaceChildren(...[...document.querySelectorAll("main section")].filter(section => !section.hidden)
      .map(section => {
        const item = make("li");
        item.append(make("a", section.dataset.short, { href: `#${section.id}` }));
        return item;
      }));
  }

  function sectionsWithContent() {
    element("break_even").hidden = !content.tables.break_even;
    element("time").hidden = !content.figures.time;
    element("numbers").hidden = content.choices.lines.length === 0;
    const hasSettings = content.settings.length > 0 || Object.keys(content.files).length > 0;
    element("settings-empty").hidden = hasSettings;
  }

  // Only what is on the screen or near it is drawn at once; the rest when the reader comes to it.

  const drawings = { choice: drawChoice };
  for (const id of ["loss", "error", "events", "gradients", "bytes", "time"]) drawings[id] = () => drawFigure(id);
  const pending = new Set();

  function isNear(id) {
    const { top, bottom } = element(`plot-${id}`).closest("section").getBoundingClientRect();
    return top < window.innerHeight + MARGIN && bottom > -MARGIN;
  }

  async function drawPending(isMeant = isNear) {
    for (const id of [...pending].filter(isMeant)) {
      pending.delete(id);
      await drawings[id]();
      await new Promise(done => setTimeout(done));  // the reader can use the page meanwhile
    }
  }

  async function drawPlots() {
    if (!window.Plotly) {  // its long script comes last: texts and tables are there before
      await new Promise(done => document.addEventListener("DOMContentLoaded", done, { once: true }));
    }
    Object.keys(drawings).forEach(id => pending.add(id));
    await drawPending();
  }

  function reserveHeights() {  // so that nothing moves under the reader when a plot is drawn
    for (const [id, figure] of Object.entries(content.figures)) {
      const plot = element(`plot-${id}`);
      plot.hidden = false;
      plot.style.minHeight = `${figure.layout.height}px`;
    }
    for (const id of Object.keys(drawings)) {
      const sentence = element(`plot-${id}`).closest("section").querySelector(".empty");
      if (sentence) sentence.hidden = id in content.figures;
    }
    const choice = element("plot-choice");
    choice.hidden = content.choices.lines.length === 0;
    choice.style.minHeight = `${content.choices.layout.height}px`;
  }

  async function show() {
    sectionsWithContent();
    reserveHeights();
    fillTexts();
    fillChoices();
    ["sites", "events", "break_even"].forEach(fillTable);
    await drawPlots();
    root.dataset.shown = String(Number(root.dataset.shown || 0) + 1);
  }

  // A live page: ask for what is new, and keep the last state when nobody answers

  async function poll(seconds, tag) {
    const state = element("live");
    let isOn = false;
    try {
      const answer = await fetch("data.json", { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
      isOn = answer.ok || answer.status === 304;
      if (answer.ok) {
        content = await answer.json();
        tag = answer.headers.get("ETag");
        await show();
      }
    } catch { isOn = false; }
    const text = isOn ? "live" : "not connected; the last state is shown";
    if (state.textContent !== text) state.textContent = text;
    state.dataset.state = isOn ? "on" : "off";
    setTimeout(() => poll(seconds, tag), 1000 * seconds);
  }

  element("theme").addEventListener("click", () => {
    chosenTheme = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("lightning_taco_theme", chosenTheme); } catch { /* then it holds for this visit */ }
    paintTheme();
    drawPlots();
  });
  prefersDark.addEventListener("change", () => { paintTheme(); drawPlots(); });
  chooser.addEventListener("change", drawChoice);
  window.addEventListener("scroll", () => drawPending(), { passive: true });
  window.addEventListener("beforeprint", () => drawPending(() => true));
  let wasNarrow = isNarrow();
  window.addEventListener("resize", () => {
    if (isNarrow() === wasNarrow) {
      drawPending();
      return;
    }
    wasNarrow = isNarrow();
    document.querySelectorAll(".plot").forEach(plot => Plotly.purge(plot));  // a colour bar cannot be turned
    drawPlots();
  });

  paintTheme();
  show();
  if (content.poll_seconds) poll(content.poll_seconds, null);
})();
