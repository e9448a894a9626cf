// Drawing: packed numbers enter; tissues, animations and charts leave. Names that come from data never
// reach Plotly, whose labels understand markup: they are set as text beside the pictures.
"use strict";

const PALETTE = [
  "#4477aa", "#ee8866", "#228833", "#ccbb44", "#aa3377", "#66ccee", "#8c613c", "#f3a6c0", "#7f7fd5", "#44bb99",
  "#cc3311", "#99a93b", "#5b3a8e", "#e1b07e", "#2b6c73", "#d66fb0", "#77aadd", "#6b7a1e", "#b04a5a", "#9bd3ae",
];
const VIRIDIS = ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725"];
const INFERNO = ["#1b0c41", "#4a0c6b", "#781c6d", "#a52c60", "#cf4446", "#ed6925", "#fb9b06", "#f7d13d", "#fcffa4"];
const CONFIG = { displaylogo: false, responsive: true, scrollZoom: "gl3d", modeBarButtonsToRemove: ["select2d", "lasso2d", "toImage", "autoScale2d", "resetCameraLastSave3d", "tableRotation"] };

/** Make an element; `text` is set as text and never as markup. */
function element(tag, { text, ...properties } = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  if (text !== undefined) node.textContent = text;
  node.append(...children);
  return node;
}

const cssColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const typeColour = (index) => (index < PALETTE.length ? PALETTE[index] : `hsl(${(index * 137.508) % 360} 55% ${42 + (index % 3) * 11}%)`);
/** A number as people write it: three digits that count, thousands set apart, no powers of ten. */
function shortNumber(value) {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && Math.abs(value) < 1e-6) return value > 0 ? "< 0.000001" : "> -0.000001";
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return (+value.toPrecision(3)).toLocaleString("en", { maximumFractionDigits: 8 });
}

/** Undo base64 and deflate. */
async function bytesOf(text) {
  const raw = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

/** Read 16 bit levels back to numbers; each array is unpacked once. */
const unpacked = new WeakMap();
function unpack(entry) {
  if (!unpacked.has(entry)) {
    unpacked.set(entry, bytesOf(entry.data).then((buffer) => {
      const step = (entry.high - entry.low) / 65535;
      return Float32Array.from(new Uint16Array(buffer), (level) => entry.low + level * step);
    }));
  }
  return unpacked.get(entry);
}

async function unpackPosition(position) {
  const [x, y, z] = await Promise.all([position.x, position.y, position.z].map(unpack));
  return { x, y, z };
}

/** Levels of a gene as shares of its range; -1 where its slice did not measure it. */
async function geneShares(text) {
  return Float32Array.from(new Uint8Array(await bytesOf(text)), (level) => (level === 255 ? -1 : level / 254));
}

/** The values of some rows; of all when no rows are named. */
function picked(values, rows) {
  if (!rows) return values;
  const chosen = new Float32Array(rows.length);
  for (let index = 0; index < rows.length; index += 1) chosen[index] = values[rows[index]];
  return chosen;
}

/** Bring values to [0, 1] between their ends. */
function shares(values, low, high) {
  const width = high - low || 1;
  return Float32Array.from(values, (value) => Math.min(1, Math.max(0, (value - low) / width)));
}

/** A scale over [-1, 1]: below 0 is grey, what has no value; 0 to 1 are the colours. */
function valueScale(colours) {
  const grey = cssColour("--grey");
  return [[0, grey], [0.4999, grey], ...colours.map((colour, index) => [0.5 + index / (colours.length - 1) / 2, colour])];
}

/** A scale of steps over [-1, count - 1]: grey, then a colour a type. */
function typeScale(count) {
  const colours = [cssColour("--grey"), ...Array.from({ length: count }, (_, index) => typeColour(index))];
  return colours.flatMap((colour, index) => [[index / (count + 1), colour], [(index + 1) / (count + 1), colour]]);
}

/** Draw when an element comes near the window; let WebGL go when it leaves, since browsers lend few contexts. */
function whenSeen(target, draw, clear) {
  let drawn = false;
  new IntersectionObserver((entries) => {
    const near = entries[entries.length - 1].isIntersecting;
    if (near && !drawn) { drawn = true; draw(); }
    if (!near && drawn && clear) { drawn = false; clear(); }
  }, { rootMargin: "250px 0px" }).observe(target);
}

const redraws = new Set();
const tip = document.getElementById("tip");
function showTip(event, lines) {
  tip.textContent = lines.filter(Boolean).join("\n");
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - width - 8)}px`;
  tip.style.top = `${event.clientY + 16 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 16}px`;
}

function baseLayout(extra) {
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
    font: { color: cssColour("--soft"), size: 12, family: getComputedStyle(document.body).fontFamily },
    margin: { l: 8, r: 8, t: 8, b: 8 }, modebar: { bgcolor: "rgba(0,0,0,0)", color: cssColour("--rest"), activecolor: cssColour("--accent") },
    ...extra,
  };
}

/** An axis of a chart, in the colours of the page. */
function axis(title, extra = {}) {
  return { title: { text: title, font: { size: 12 }, standoff: 6 }, gridcolor: cssColour("--grid"), linecolor: cssColour("--line"), zeroline: false, automargin: true, ...extra };
}

/** A button that saves a figure as a file. */
function saveButton(plot, name, format) {
  const button = element("button", { type: "button", className: "save", text: `Save ${format.toUpperCase()}`, title: "Save this figure as a file" });
  button.addEventListener("click", () => Plotly.downloadImage(plot, { format, scale: format === "png" ? 3 : 1, filename: name.toLowerCase().replace(/[^a-z0-9]+/g, "-") || "figure", width: plot.clientWidth, height: plot.clientHeight }));
  return button;
}

/** A chart in SVG: drawn when it comes into view, and again when the theme changes. */
function chart(parent, height, figure, title, hint) {
  const plot = element("div", { className: "plot" });
  plot.style.height = `${height}px`;
  const head = element("div", { className: "chart-head" }, ...(title ? [element("h3", { text: title })] : []), saveButton(plot, title || "chart", "svg"));
  const box = element("div", { className: "chart" }, head, plot);
  if (hint) box.append(element("p", { className: "hint", text: hint }));
  parent.append(box);
  const draw = async () => {
    const { traces, layout } = figure();
    await Plotly.react(plot, traces, baseLayout({ margin: { l: 48, r: 12, t: 10, b: 40 }, ...layout }), { displayModeBar: false, responsive: true });
    plot.dataset.state = "drawn";
  };
  whenSeen(plot, () => { redraws.add(draw); draw(); });
  return { box, draw };
}

/** Buttons of which one is pressed. */
function segments(names, chosen, choose) {
  const buttons = names.map((name) => element("button", { type: "button", text: name }));
  const press = (name) => buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.textContent === name)));
  buttons.forEach((button) => button.addEventListener("click", () => { press(button.textContent); choose(button.textContent); }));
  press(chosen);
  return element("div", { className: "segments" }, ...buttons);
}

/** A small still picture of a gene: cells as dots on a plain canvas, which takes no WebGL context. */
function thumbnail(canvas, x, y, values) {
  const width = (canvas.width = 240), height = (canvas.height = 208), context = canvas.getContext("2d");
  let [left, right, bottom, top] = [Infinity, -Infinity, Infinity, -Infinity];
  for (let n = 0; n < x.length; n += 1) {
    left = Math.min(left, x[n]); right = Math.max(right, x[n]); bottom = Math.min(bottom, y[n]); top = Math.max(top, y[n]);
  }
  const zoom = Math.min((width - 12) / (right - left || 1), (height - 12) / (top - bottom || 1));
  const dot = Math.min(9, Math.max(1.5, 0.8 * Math.sqrt((width * height) / 2 / x.length)));
  const table = Array.from({ length: 64 }, (_, level) => mixed(VIRIDIS, level / 63));
  const grey = cssColour("--grey");
  for (let n = 0; n < x.length; n += 1) {
    context.fillStyle = values[n] < 0 ? grey : table[Math.round(values[n] * 63)];
    context.fillRect(width / 2 + (x[n] - (left + right) / 2) * zoom - dot / 2, height / 2 - (y[n] - (top + bottom) / 2) * zoom - dot / 2, dot, dot);
  }
}

/** A colour between those of a list. */
function mixed(colours, share) {
  const at = share * (colours.length - 1), first = Math.min(Math.floor(at), colours.length - 2), rest = at - first;
  const parts = [colours[first], colours[first + 1]].map((colour) => [1, 3, 5].map((start) => parseInt(colour.slice(start, start + 2), 16)));
  return `rgb(${parts[0].map((value, index) => Math.round(value + (parts[1][index] - value) * rest)).join(",")})`;
}
