"use strict";

// Numbers, limits and labels arrive ready to draw, null where a run diverged: here they become places in a chart.
const DATA = JSON.parse(document.getElementById("data").textContent);
const NAMESPACE = document.getElementById("svg").namespaceURI; // so that no address has to be written here
const SHAPES = ["svg", "g", "path", "text", "circle"];

function element(tag, attributes = {}, ...children) {
  const node = SHAPES.includes(tag) ? document.createElementNS(NAMESPACE, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function button(attributes, act, ...children) {
  const node = element("button", { type: "button", ...attributes }, ...children);
  node.addEventListener("click", act);
  return node;
}

/** Attributes that give an element the colour and the line style of a method. */
function looks({ look }, name = "") {
  const style = `--colour: ${look.colour}; --dark: ${look.dark}`;
  return { class: `${name} method ${look.dashed ? "dashed" : ""}`, style };
}

function marker({ outline }, [x, y], size) {
  const transform = `translate(${x.toFixed(1)} ${y.toFixed(1)}) scale(${size})`;
  return element("path", { class: "marker", d: outline, transform });
}

function swatch(entry) {
  const line = element("path", { class: "line", d: "M0 6H26" });
  const attributes = { ...looks(entry, "swatch"), viewBox: "0 0 26 12", "aria-hidden": true };
  return element("svg", attributes, line, marker(entry, [13, 6], 4));
}

/** Three digits, for the box at the crosshair. */
function short(value) {
  const size = Math.abs(value);
  if (value === 0 || (size >= 1000 && size < 1e5)) return value.toFixed(0);
  return size < 1e-3 || size >= 1e5 ? value.toExponential(2).replace("e+", "e") : value.toPrecision(3);
}

// -- one chart

/** From values of an axis to pixels. */
function scale(axis, from, to) {
  const transform = axis.scale === "log" ? Math.log : Number;
  const [low, high] = [transform(axis.low), transform(axis.high)];
  return (value) => from + ((transform(Math.max(value, axis.least ?? value)) - low) / (high - low)) * (to - from);
}

function chart(legend, panel, state) {
  const plot = element("svg", { class: "plot", role: "img" });
  const tip = element("div", { class: "tip", role: "status", hidden: "" });
  const figure = element("figure", { class: "chart", "data-quantity": panel.quantity },
    element("h3", {}, panel.title), plot, tip);
  let shown, along, width, box, right, up; // what is drawn: curves, epochs or seconds, from values to pixels
  let hover; // the layer of the crosshair

  function draw() {
    along = panel.x[state.x] ? state.x : "epochs";
    const [x, y] = [panel.x[along], panel.y[state.y] ?? panel.y.linear];
    shown = legend.map((entry, index) => ({ entry, index, curve: panel.curves[index] }))
      .filter(({ entry, curve }) => curve && !state.hidden.has(entry));
    width = Math.max(260, figure.clientWidth);
    const [least, share, most] = panel.x.seconds ? [264, 0.64, 430] : [210, 0.46, 300];
    const height = Math.round(Math.min(most, Math.max(least, share * width)));
    box = { left: 50, right: width - 6, top: 10, bottom: height - 42 };
    right = scale(x, box.left, box.right);
    up = scale(y, box.bottom, box.top);
    plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
    plot.setAttribute("aria-label", `${panel.title}, ${x.title}: ${shown.map(({ entry }) => entry.label).join(", ")}`);
    const inside = { x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top + 6 };
    const viewBox = Object.values(inside).join(" "); // the same pixels, and what lies outside is cut off
    hover = element("g");
    plot.replaceChildren(axes(x, y), element("svg", { ...inside, viewBox }, ...shown.map(band), ...shown.map(line)), hover);
    leave();
  }

  function axes(x, y) {
    const levels = y.ticks.map(([value, label]) => [up(value), label]);
    const places = x.ticks.map(([value, label]) => [right(value), label]);
    return element("g", {}, rule("frame", box.bottom),
      ...levels.flatMap(([at, label]) => [rule("grid", at), text("y", box.left - 8, at + 4, label, at)]),
      ...places.flatMap(([at, label]) => [upright("grid", at), text("x", at, box.bottom + 18, label, at)]),
      ...panel.guides.map((value) => rule("guide", up(value))),
      text("title", (box.left + box.right) / 2, box.bottom + 37, x.title));
  }

  const rule = (name, at) => element("path", { class: name, d: `M${box.left} ${at.toFixed(1)}H${box.right}` });
  const upright = (name, at) => element("path", { class: name, d: `M${at.toFixed(1)} ${box.top}V${box.bottom}` });
  const text = (name, x, y, label, at = "") => element("text", { class: name, x, y, "data-at": at }, label);
  const path = (points) => "M" + points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");

  /** Pixels of the middle, low or high of a curve; what is infinite lies far above the chart. */
  function pixels(curve, series) {
    const height = (value) => (value === null ? -2000 : Math.max(-2000, up(value)));
    return curve[series].map((value, index) => [right(curve[along][index]), height(value)]);
  }

  function band({ entry, curve }) {
    const d = path([...pixels(curve, "high"), ...pixels(curve, "low").reverse()]) + "z";
    return element("g", looks(entry), element("path", { class: "band", d }));
  }

  function line({ entry, index, curve }) {
    const points = pixels(curve, "middle");
    // Few markers on a long curve, at places that differ from those of the other curves.
    const every = points.length > 24 ? Math.ceil(points.length / 12) : 1;
    const offset = Math.floor((index * every) / legend.length);
    const marked = points.filter(([, y], at) => at % every === offset && y > -100);
    return element("g", { ...looks(entry, "curve"), "data-label": entry.label },
      element("path", { class: "line", d: path(points) }),
      ...marked.map((point) => marker(entry, point, entry.look.dashed ? 4.3 : 3.6)));
  }

  /** Show the values of all curves at a recorded point, or at their own nearest to it. */
  function show(focus) {
    const [at, unit] = [right(focus), panel.x.epochs.title.replace(/s$/, "")];
    const where = (value) => (along === "epochs" ? `${unit} ${Number(value.toPrecision(3))}` : `${short(value)} s`);
    const readings = shown.map(({ entry, curve }) => {
      const index = curve[along].indexOf(nearest(curve[along], at));
      const [middle, low, high] = [curve.middle, curve.low, curve.high].map((series) => series[index]);
      return { entry, place: curve[along][index], middle, low, high, seeds: curve.seeds[index] };
    });
    readings.sort((a, b) => (a.middle ?? Infinity) - (b.middle ?? Infinity));
    hover.replaceChildren(upright("crosshair", at));
    const table = element("table");
    for (const { entry, place, middle, low, high, seeds } of readings) {
      if (middle !== null && up(middle) >= box.top) {
        const circle = element("circle", { class: "point", cx: right(place), cy: up(middle), r: 4 });
        hover.append(element("g", looks(entry), circle));
      }
      table.append(element("tr", {}, element("td", {}, swatch(entry)), element("td", { class: "name" }, entry.label),
        element("td", { class: "value" }, written(middle)),
        element("td", {}, seeds > 1 ? `${written(low)} … ${written(high)}` : ""),
        element("td", {}, Math.abs(right(place) - at) > 1.5 ? `at ${where(place)}` : "")));
    }
    tip.replaceChildren(element("strong", {}, where(focus)), table);
    tip.hidden = false;
    // Beside the line where there is room, or else below the chart.
    const beside = at < width / 2 ? at + 14 : at - 14 - tip.offsetWidth;
    const fits = beside >= 0 && beside + tip.offsetWidth <= width;
    tip.style.left = `${fits ? beside : 0}px`;
    tip.style.top = `${plot.getBoundingClientRect()[fits ? "top" : "bottom"] - figure.getBoundingClientRect().top}px`;
  }

  const written = (value) => (value === null ? "diverged" : short(value) + panel.unit);

  /** The value that is drawn nearest to a pixel. */
  function nearest(values, pixel) {
    const distance = (value) => Math.abs(right(value) - pixel);
    return values.reduce((best, value) => (distance(value) < distance(best) ? value : best));
  }

  function leave() {
    tip.hidden = true;
    hover.replaceChildren();
  }

  function follow(event) {
    const values = shown.flatMap(({ curve }) => curve[along]);
    if (values.length) show(nearest(values, event.clientX - plot.getBoundingClientRect().left));
  }

  for (const name of ["pointermove", "pointerdown"]) plot.addEventListener(name, follow);
  plot.addEventListener("pointerleave", leave);
  new ResizeObserver(draw).observe(figure);
  return { figure, draw };
}

// -- tables

/** A table whose first column heads its rows. */
function table(name, columns, rows, swatches = [], best = []) {
  const head = columns.map((text) => element("th", { scope: "col" }, text));
  const body = rows.map(([label, ...texts], row) => element("tr", {},
    element("th", { scope: "row" }, swatches[row] ?? "", label),
    ...texts.map((text, at) => element("td", { class: best[row]?.[at + 1] ? "best" : "" }, text))));
  return element("div", { class: `scroll ${name}` },
    element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body)));
}

// -- charts with what steers them

function switchOf(label, options, choose) {
  const buttons = Object.entries(options).map(([value, text], index) =>
    button({ "data-value": value, "aria-pressed": index === 0 }, () => {
      buttons.forEach((other) => other.setAttribute("aria-pressed", other.dataset.value === value));
      choose(value);
    }, text));
  return element("div", { class: "switch", role: "group", "aria-label": label }, ...buttons);
}

function legendOf(entries, hidden, redraw) {
  const toggles = entries.map((entry) => {
    const toggle = button({ class: "toggle", "data-label": entry.label, "aria-pressed": true }, () => {
      if (!hidden.delete(entry)) hidden.add(entry);
      toggle.setAttribute("aria-pressed", !hidden.has(entry));
      redraw();
    }, swatch(entry), entry.label);
    return toggle;
  });
  return element("div", { class: "legend", role: "group", "aria-label": "curves" }, ...toggles);
}

/** Controls of a drawing, the charts that can be drawn against time, and the others. */
function chartsOf({ legend, panels }, horizontal) {
  const state = { x: Object.keys(horizontal)[0], y: "log", hidden: new Set() };
  const charts = panels.map((panel) => chart(legend, panel, state));
  const redraw = () => charts.forEach(({ draw }) => draw());
  const choose = (name) => (value) => { state[name] = value; redraw(); };
  const controls = element("div", { class: "controls" },
    switchOf("horizontal axis", horizontal, choose("x")),
    switchOf("vertical axis", { log: "Log", linear: "Linear" }, choose("y")),
    legendOf(legend, state.hidden, redraw));
  const figures = (timed) => charts.filter((_, at) => "seconds" in panels[at].x === timed).map(({ figure }) => figure);
  return [controls, ...[true, false].map((timed) => element("div", { class: "charts" }, ...figures(timed)))];
}

const paragraph = (name, content) => element("p", { class: name }, content);
