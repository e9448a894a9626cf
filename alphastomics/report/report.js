// The page: data from the block above enter; each section is filled, or says why it is empty.
"use strict";

const data = JSON.parse(document.getElementById("report-data").textContent);
const withUnit = (value) => `${shortNumber(value)} ${data.unit}`;
const bodyOf = (id) => document.querySelector(`#${id} .body`);
// As high as the tissue needs at half the page's width, and no higher than a laptop's window.
const aspect = (data.position.y.high - data.position.y.low) / (data.position.x.high - data.position.x.low || 1);
const sideHeight = Math.round(Math.max(320, Math.min(0.66 * innerHeight, 570, 560 * aspect + 40)));

/** Say that a part is missing, and why; quietly when that is nobody's loss. */
function absent(parent, what, reason, style = "note") {
  parent.append(element("p", { className: style, text: reason ? `${what}: ${reason}.` : `${what}.` }));
}

// What a tissue can be coloured by.
const byType = (arrays) => ({ label: data.types_are, group: "Cells", types: true, arrays });
const typeArrays = (...entries) => async () => Promise.all(entries.map(unpack));
const byValue = (label, entry, panels, colours, unit) => ({
  label, group: "Cells", low: entry.low, high: entry.high, colours, unit,
  arrays: async () => { const values = shares(await unpack(entry), entry.low, entry.high); return Array(panels).fill(values); },
});
const byGenes = (left, right) => data.genes.map((gene) => ({
  label: gene.name, group: "Genes", low: gene.low, high: gene.high, colours: VIRIDIS, unit: "model units",
  arrays: async () => (left === right ? Array(2).fill(await geneShares(gene[left])) : Promise.all([gene[left], gene[right]].map(geneShares))),
}));
const byColumns = (panels) => data.columns.map((column) => ({
  label: column.name, group: "Columns of obs", ...(column.names ? { types: true, names: column.names } : { low: column.low, high: column.high, colours: VIRIDIS, unit: "" }),
  arrays: async () => Array(panels).fill(column.names ? await unpack(column.codes) : await geneShares(column.levels)),
}));
const byAnchors = () => (data.predicted_position.anchors ? [{ label: "Given or predicted", group: "Cells", types: true, names: ["predicted", "anchor"], arrays: async () => Array(2).fill(await unpack(data.predicted_position.anchors)) }] : []);
const bySlice = () => ({ label: "One colour", group: "Cells", low: 0, high: 1, colours: ["#4477aa", "#4477aa"], arrays: async () => Array(2).fill(new Float32Array(data.shown)) });
const cellsFirst = (arrays) => (data.types ? [byType(arrays)] : data.genes.length ? [] : [bySlice()]);

/** What is shown of a cell under the pointer. */
function cellWords(row, panel, { newTissue } = {}) {
  const isNew = newTissue && panel === 1;
  const slice = known.slice ? data.slices[Math.round(known.slice[row])] : "";
  const codes = isNew ? known.newType : known.type;
  return [
    isNew ? "a new cell" : data.names ? `cell ${data.names[row]}` : "",
    data.slices.length > 1 ? `slice ${slice}` : "",
    data.types && codes ? `${isNew ? "most like " : ""}${data.types[Math.round(codes[row])]}` : "",
    !isNew && known.error ? `predicted ${withUnit(known.error[row])} from its true position` : "",
    !isNew && known.std ? `std of the samples ${withUnit(known.std[row])}` : "",
  ];
}
const known = {};
async function unpackKnown() {
  const entries = { slice: data.slice, type: data.type, newType: data.new?.type, error: data.predicted_position?.error, std: data.predicted_position?.std };
  for (const [name, entry] of Object.entries(entries)) if (entry) known[name] = await unpack(entry);
}

function tissues(parent, options) {
  return new Tissues(parent, { slices: data.slices, sliceOf: data.slice, dims: data.dims, types: data.types, linked: true, height: sideHeight, cells: cellWords, ...options });
}

function showHead() {
  document.getElementById("verdict").append(...data.verdict.map((text) => element("li", { text })));
  document.getElementById("facts").append(...data.facts.map(([name, value]) => element("div", {}, element("dt", { text: name }), element("dd", { text: value }))));
  const notes = [];
  if (data.shown < data.cells) notes.push(`${data.shown.toLocaleString("en")} of ${data.cells.toLocaleString("en")} cells are drawn, chosen at random from every slice; all scores and curves are from all cells.`);
  if (data.genes.length < data.num_genes) notes.push(`${data.genes.length} of ${data.num_genes} genes can be chosen as colours: the most spatial ones, and those asked for with --genes.`);
  if (data.types_are === "Cluster") notes.push("The data have no cell types: cells are coloured by k-means clusters of their expression.");
  else if (!data.types) notes.push("The data have no cell types: tissues are coloured by genes.");
  const note = document.getElementById("subsampled");
  note.textContent = notes.join(" ");
  note.hidden = !notes.length;
  document.getElementById("nav").append(...[...document.querySelectorAll("[data-nav]")].filter((section) => !data.generated || section.id === "new").map((section) => element("a", { href: `#${section.id}`, text: section.dataset.nav })));
  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    redraws.forEach((draw) => draw());
  });
}

// Scores.
const isOurs = (method, table) => method.startsWith(table.ours);

function scoreBars(table, metric) {
  const values = table.methods.map((method) => table.values[method][metric.name]);
  const arrow = { higher: "↑", lower: "↓", nearest: "", unknown: "" }[metric.better];
  const rows = table.methods.map((method, index) => {
    const row = element("div", { className: `bar-row${isOurs(method, table) ? " ours" : ""}${table.aside.includes(method) ? " oracle" : ""}` },
      element("span", { text: `${method}${method === metric.best ? " ★" : ""}` }), element("b", { text: shortNumber(values[index]) }), element("i"));
    row.style.setProperty("--share", `${Math.min(100, (100 * Math.max(0, values[index] ?? 0)) / metric.full)}%`);
    return row;
  });
  return element("div", { title: metric.meaning }, element("h3", { text: metric.label + " " }, element("small", { text: arrow })), ...rows, element("p", { className: "hint", text: metric.meaning }));
}

function scoreTable(table) {
  const head = element("tr", {}, element("th", { text: "metric" }), ...table.methods.map((method) => element("th", { text: method })));
  const rows = table.metrics.map((metric) => {
    const arrow = { higher: " ↑", lower: " ↓", nearest: "", unknown: "" }[metric.better];
    return element("tr", {}, element("td", { text: metric.label + arrow, title: metric.meaning }),
      ...table.methods.map((method) => element("td", { className: method === metric.best ? "best" : "", text: shortNumber(table.values[method][metric.name]) })));
  });
  return element("div", { className: "table" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
}

function showScores() {
  const body = bodyOf("scores");
  if (!data.scores?.length) return absent(body, "No scores", data.missing.scores);
  for (const table of data.scores) {
    const named = Object.fromEntries(table.metrics.map((metric) => [metric.name, metric]));
    const bars = element("div", { className: "bars" }, ...table.headlines.map((name) => scoreBars(table, named[name])));
    const all = element("details", {}, element("summary", { text: `All ${table.metrics.length} metrics` }), scoreTable(table));
    const mode = element("div", { className: "mode" }, element("h3", { text: table.title }), bars, all);
    if (table.methods.length === 1) absent(mode, "No baseline was scored");
    body.append(mode);
  }
}

// Tissues.
function showPositions() {
  const body = bodyOf("positions");
  if (!data.predicted_position) return absent(body, "Not shown", data.missing.predicted_position);
  const panels = [{ title: "True tissue", position: data.position }, { title: data.predicted_position.assigned ? "Assigned: a position of the tissue for each cell" : "Predicted by the model", position: data.predicted_position.position, marked: data.predicted_position.anchors }];
  if (data.predicted_position.anchors) body.append(element("p", { className: "note", id: "anchors", text: "Ringed cells on the right are anchors: their positions were given. All errors and scores are those of the other cells." }));
  const measures = [byValue("Error", data.predicted_position.error, 2, INFERNO, data.unit)];
  const { radius } = data.predicted_position;
  if (radius) measures.push(byValue(radiusTitle(radius), radius.map, 2, VIRIDIS, data.unit));
  else if (data.predicted_position.std) measures.push(byValue("Std of the samples", data.predicted_position.std, 2, VIRIDIS, data.unit));
  tissues(body, { panels, choices: [...cellsFirst(typeArrays(data.type, data.type)), ...(data.types ? measures : []), ...byColumns(2), ...byAnchors(), ...byGenes("true", "true"), ...(data.types ? [] : measures)] });
}

function showPath() {
  const body = bodyOf("path");
  if (!data.path) return absent(body, "Not shown", data.missing.path);
  new Player(body, data.path, data.types);
}

function radiusTitle(radius) {
  return `Radius that holds ${shortNumber(100 * radius.share)} % of the cells`;
}

/** What a biologist must know before taking a radius for an error bar. */
function radiusLimits({ by, by_section: bySection }) {
  if (bySection) return "They are as large as errors within that section: what differs between both sections makes cells lie further off.";
  if (by === "anchors") return "They hold where the anchors are a random part of the slice; anchors of one region say nothing of the others.";
  return "They hold for slices like those; on slices of another animal or technique cells may be further off.";
}

function showErrors() {
  const body = bodyOf("errors");
  if (!data.predicted_position) return absent(body, "Not shown", data.missing.predicted_position);
  const { error, std, calibration, radius } = data.predicted_position;
  const second = radius ? [[radiusTitle(radius), radius.map]] : std ? [["Std of the samples", std]] : [];
  const sides = [["Error: distance from the true position", error], ...second];
  // A scale of its own for each map: the std is far smaller than the error, and would be one colour.
  const scales = sides.map(([label, entry], side) => ({ label, low: 0, high: entry.high, colours: [INFERNO, VIRIDIS][side], unit: data.unit }));
  const both = { label: "Distance", group: "Cells", scales, arrays: async () => Promise.all(sides.map(async ([, entry]) => shares(await unpack(entry), 0, entry.high))) };
  tissues(body, { panels: sides.map(([title]) => ({ title, position: data.position })), choices: [both], height: Math.round(sideHeight * 0.8) });
  showErrorsByGroup(body);
  const line = (x, y) => ({ x, y, mode: "lines", line: { color: cssColour("--rest"), dash: "dot", width: 1.5 }, hoverinfo: "skip" });
  const points = (x, y, words) => ({ x, y, mode: "lines+markers", marker: { size: 7, color: cssColour("--accent") }, line: { color: cssColour("--accent"), width: 2 }, hovertemplate: words });
  const share = (title) => axis(title, { range: [0, 1], tickformat: ".0%" });
  if (radius) {
    body.append(element("p", { className: "note", id: "calibrated", text: `Of 100 cells, the radius promises to hold ${shortNumber(100 * radius.share)}, and holds ${Math.round(100 * radius.held)} here: so many lie within it about their predicted position. Half of the radii are below ${withUnit(radius.median)}. Radii are calibrated by ${radius.by}. ${radiusLimits(radius)}` }));
    const row = body.appendChild(element("div", { className: "row" }));
    return chart(row, 300, () => ({
      traces: [line([0, 1], [0, 1]), points(radius.level, radius.covered, "promised %{x:.0%}<br>held %{y:.0%}<extra></extra>")],
      layout: { xaxis: share("share of cells that the radius promises to hold"), yaxis: share("share that it holds here") },
    }), "Coverage", "On the dotted line the radii are right; below it they are too small for these cells.");
  }
  if (!std) return absent(body, "No uncertainty", data.missing.std);
  body.append(element("p", { className: "note", id: "uncalibrated", text: `The std of the samples is not calibrated${calibration.ratio === null ? "" : `: errors are ${shortNumber(calibration.ratio)} times as large`}. Do not read it as a confidence interval; it ranks cells at most.` }));
  const row = body.appendChild(element("div", { className: "row" }));
  const most = Math.max(...calibration.std, ...calibration.error) * 1.06;
  const factor = calibration.ratio === null ? "" : ` Errors are ${shortNumber(calibration.ratio)} × the std over all cells.`;
  const follows = calibration.correlation === null ? "" : ` Std and error of single cells: Spearman ${shortNumber(calibration.correlation)}.`;
  chart(row, 300, () => ({
    traces: [line([0, most], [0, most]), points(calibration.std, calibration.error, "std %{x:,.3r}<br>error %{y:,.3r}<extra></extra>")],
    layout: { xaxis: axis(`std of the samples (${data.unit})`, { rangemode: "tozero" }), yaxis: axis(`error (${data.unit})`, { rangemode: "tozero" }) },
  }), "Cells grouped by std", `On the dotted line the std is right; above it the model is too sure.${factor}${follows}`);
  chart(row, 300, () => ({
    traces: [line([0, 1], [0, 1]), points(calibration.level, calibration.covered, "expected %{x:.0%}<br>observed %{y:.0%}<extra></extra>")],
    layout: { xaxis: share("share of cells expected within the region"), yaxis: share("share observed") },
  }), "Coverage", "Regions that should hold this share of the cells, were errors Gaussian with the std, against the share that they hold. Below the line the model is too sure.");
}

/** Median error of each type, or cluster, as bars. */
function showErrorsByGroup(body) {
  const groups = data.predicted_position.by_group;
  if (!groups?.length) return;
  const largest = Math.max(...groups.map((group) => group.error), 1e-12);
  const rows = groups.map(({ name, cells, error }) => {
    const row = element("div", { className: "bar-row ours" }, element("span", { text: `${name} (${cells.toLocaleString("en")} cells)` }), element("b", { text: withUnit(error) }), element("i"));
    row.style.setProperty("--share", `${(100 * error) / largest}%`);
    return row;
  });
  body.append(element("div", { className: "by-group" }, element("h3", { text: `Median error by ${data.types_are.toLowerCase()}` }), ...rows));
}

function showPredicted() {
  const body = bodyOf("predicted");
  if (!data.agreement) return absent(body, "Not shown", data.missing.predicted);
  if (data.held) {
    const [promised, held, by] = data.held;
    body.append(element("p", { className: "note", id: "intervals", text: `Each predicted value has an interval that promises to hold the true one for ${shortNumber(100 * promised)} of 100 cells; here it holds ${Math.round(100 * held)}. Intervals are calibrated by ${by}.` }));
  }
  const panels = [{ title: "Measured", position: data.position }, { title: "Predicted from positions", position: data.position }];
  const state = { stretch: false };
  const choices = byGenes("true", "predicted").map((choice) => ({ ...choice, arrays: async () => {
    const [measured, predicted] = await choice.arrays();
    return [measured, state.stretch ? stretched(predicted) : predicted];
  } }));
  const view = tissues(body, { panels, choices, stretched: (panel) => panel === 1 && state.stretch });
  const scales = segments(["same colours", "prediction stretched"], "same colours", (chosen) => { state.stretch = chosen !== "same colours"; view.draw(); });
  scales.title = "Stretched: the prediction's own range takes all colours, which shows a pattern that is right but too weak";
  body.querySelector(".controls").append(scales);
  geneThumbnails(body, view);
  geneCharts(body);
}

/** Let the values' own range, but for the outermost hundredths, take all colours. */
function stretched(values) {
  const known = values.filter((value) => value >= 0).sort();
  const [low, high] = [0.01, 0.99].map((share) => known[Math.round(share * (known.length - 1))]);
  return shares(values, low, high);
}

function geneThumbnails(body, view) {
  const picks = data.genes.slice(0, 8);
  const r = Object.fromEntries(data.agreement.genes.map((name, index) => [name, data.agreement.pearson[index]]));
  const thumbs = picks.map((gene, index) => {
    const canvases = [element("canvas"), element("canvas")];
    const words = r[gene.name] === null ? "" : `r = ${r[gene.name].toFixed(2)}`;
    const thumb = element("button", { className: "thumb", type: "button" }, element("h3", {}, element("span", { text: gene.name }), element("small", { text: words })), element("div", { className: "pair" }, ...canvases));
    thumb.addEventListener("click", () => { view.choose(index); view.stage.scrollIntoView({ behavior: "smooth", block: "center" }); });
    const draw = async () => {
      const { x, y } = await unpackPosition(data.position);
      const slice = await unpack(data.slice);
      const chosen = [...slice.keys()].filter((row) => Math.round(slice[row]) === Math.max(view.slice, 0));
      const every = Math.max(1, Math.floor(chosen.length / 4000));
      const rows = chosen.filter((_, index) => index % every === 0);
      const pick = (values) => picked(values, rows);
      for (const [side, part] of ["true", "predicted"].entries()) thumbnail(canvases[side], pick(x), pick(y), pick(await geneShares(gene[part])));
      thumb.dataset.state = "drawn";
    };
    whenSeen(thumb, () => { redraws.add(draw); draw(); });
    thumb.setAttribute("aria-pressed", String(index === 0));
    return thumb;
  });
  view.onChoice = (index) => thumbs.forEach((thumb, item) => thumb.setAttribute("aria-pressed", String(item === index)));
  body.append(element("h3", { text: "The most spatial genes: measured left, predicted right", style: "margin-top: 20px" }), element("div", { className: "thumbs" }, ...thumbs));
}

function geneCharts(body) {
  const { genes, pearson, moran_true: before, moran_predicted: after } = data.agreement;
  const row = body.appendChild(element("div", { className: "row" }));
  const order = [...genes.keys()].filter((index) => pearson[index] !== null).sort((one, other) => pearson[other] - pearson[one]);
  const plain = (name) => name.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  const dots = (x, y, names, words) => ({ x, y, customdata: names.map(plain), mode: "markers", marker: { size: 6, opacity: 0.75, color: cssColour("--accent") }, hovertemplate: words });
  chart(row, 300, () => ({
    traces: [dots(order.map((_, rank) => rank + 1), order.map((index) => pearson[index]), order.map((index) => genes[index]), "%{customdata}<br>r = %{y:.2f}<extra></extra>")],
    layout: { xaxis: axis("genes, best first"), yaxis: axis("Pearson r over cells") },
  }), "Agreement by gene", "Correlation of measured and predicted values over the cells. Genes without a spatial pattern cannot be predicted from a position: they lie near 0.");
  const ends = [...before, ...after].filter((value) => value !== null);
  const [least, most] = [Math.min(0, ...ends), Math.max(...ends, 0.1)];
  chart(row, 300, () => ({
    traces: [
      { x: [least, most], y: [least, most], mode: "lines", line: { color: cssColour("--rest"), dash: "dot", width: 1.5 }, hoverinfo: "skip" },
      dots(before, after, genes, "%{customdata}<br>measured %{x:.2f}<br>predicted %{y:.2f}<extra></extra>"),
    ],
    layout: { xaxis: axis("Moran's I, measured"), yaxis: axis("Moran's I, predicted") },
  }), "Spatial order by gene", "1: neighbours are the same; 0: no order. Points to the right should lie high. A prediction of means is smoother than single cells, so that points lie above the line.");
}

/** Cells that were made, and nothing else: all sections at once. */
function showGenerated() {
  for (const section of document.querySelectorAll("[data-nav]")) section.hidden = section.id !== "new";
  document.querySelector(".kicker").textContent = "Cells that were made";
  const body = bodyOf("new");
  body.previousElementSibling.textContent = "Cells that never were, at positions between or beside the measured sections. Choose one section, or see all of them in space.";
  tissues(body, { panels: [{ title: "Virtual sections", position: data.position }], linked: false, first: -1, choices: [...cellsFirst(typeArrays(data.type)), ...byGenes("true", "true")], cells: (row) => cellWords(row, 0) });
}

function showNew() {
  const body = bodyOf("new");
  if (!data.new) return absent(body, "Not shown", data.missing.new);
  const panels = [{ title: "True tissue", position: data.position }, { title: "New tissue", position: data.new.position }];
  tissues(body, { panels, linked: false, choices: [...cellsFirst(typeArrays(data.type, data.new.type)), ...byGenes("true", "new")], cells: (row, panel) => cellWords(row, panel, { newTissue: true }) });
}

// Training and the network.
/** A running mean: single steps draw their own noise, and jump with it. */
function smoothed(values) {
  const reach = Math.max(1, Math.round(values.length / 20));
  return values.map((_, item) => {
    const near = values.slice(Math.max(0, item - reach), item + reach + 1).filter((value) => value !== null);
    return near.length ? near.reduce((sum, value) => sum + value, 0) / near.length : null;
  });
}

function showTraining() {
  const body = bodyOf("training");
  const titles = { loss: "Total loss", expression: "Expression", position: "Position", masked: "Masked entries", balance: "Expert balance" };
  const logged = Object.keys(data.curves).map((name) => name.slice(name.indexOf("/") + 1));
  const terms = [...new Set([...Object.keys(titles), ...logged])].filter((term) => ["train", "val"].some((part) => data.curves[`${part}/${term}`]?.value.some((value) => value)));
  if (!terms.length) return absent(body, "No curves", data.missing.curves || "the run has logged no losses");
  let type = "linear";
  const row = element("div", { className: "row" });
  const dots = [["training, smoothed", "--accent"], ["training, single steps", "--rest"], ["validation", "--second"]].map(([text, colour]) => { const dot = element("i"); dot.style.background = `var(${colour})`; return element("span", { className: "chip" }, dot, element("span", { text })); });
  const line = (curve, y, colour, width, words) => ({ x: curve.step, y, mode: "lines", line: { color: cssColour(colour), width }, hovertemplate: words });
  const charts = terms.map((term) => chart(row, 240, () => {
    const [train, val] = ["train", "val"].map((part) => data.curves[`${part}/${term}`]);
    const traces = [];
    if (train) traces.push({ ...line(train, train.value, "--rest", 1, ""), opacity: 0.45, hoverinfo: "skip", hovertemplate: undefined }, line(train, smoothed(train.value), "--accent", 2, "step %{x}<br>training %{y:,.4r}<extra></extra>"));
    if (val) traces.push(line(val, val.value, "--second", 2.2, "step %{x}<br>validation %{y:,.4r}<extra></extra>"));
    return { traces, layout: { xaxis: axis("step"), yaxis: axis("", { type }) } };
  }, titles[term] ?? term));
  body.append(element("div", { className: "controls" }, segments(["linear", "log"], type, (chosen) => { type = chosen; charts.forEach(({ draw }) => draw()); }), ...dots), row);
}

/** One small chart a layer, in a grid of one figure. */
function layerGrid(count, subplot) {
  const columns = Math.min(count, 4), rows = Math.ceil(count / columns);
  const layout = { grid: { rows, columns, pattern: "independent", xgap: 0.12, ygap: 0.35 }, annotations: [], margin: { l: 48, r: 16, t: 26, b: 44 } };
  const traces = [];
  for (let layer = 0; layer < count; layer += 1) {
    const number = layer ? String(layer + 1) : "";
    const { series, x, y } = subplot(layer);
    traces.push(...series.map((trace) => ({ ...trace, xaxis: `x${number}`, yaxis: `y${number}` })));
    Object.assign(layout, { [`xaxis${number}`]: x, [`yaxis${number}`]: y });
    layout.annotations.push({ text: `layer ${layer + 1}`, showarrow: false, xref: `x${number} domain`, yref: `y${number} domain`, x: 0.5, y: 1, yanchor: "bottom", font: { size: 12 } });
  }
  return { traces, layout };
}
const gridHeight = (count) => 60 + 190 * Math.ceil(count / 4);

function showExperts(body, inside) {
  if (!inside.expert_use) return absent(body, "Expert use", "this network has no experts (use_moe)", "hint");
  const layers = inside.expert_use[0].length, experts = inside.expert_use[0][0].length;
  chart(body, gridHeight(layers), () => layerGrid(layers, (layer) => ({
    series: [{
      type: "heatmap", x: inside.time.map(String), y: Array.from({ length: experts }, (_, expert) => `expert ${expert + 1}`), z: Array.from({ length: experts }, (_, expert) => inside.expert_use.map((look) => look[layer][expert])),
      zmin: 0, zmax: Math.min(1, 2 / experts), colorscale: VIRIDIS.map((colour, index) => [index / (VIRIDIS.length - 1), colour]), showscale: layer === 0 && layers > 0, colorbar: { thickness: 8, len: 0.9, tickformat: ".0%", x: 1.01, outlinewidth: 0 },
      xgap: 2, ygap: 2, hovertemplate: "t = %{x}<br>%{y}: %{z:.0%}<extra></extra>",
    }],
    x: axis("diffusion time", { type: "category" }), y: axis(""),
  })), "Expert use by diffusion time", `Share of the cells' choices that fell on each expert; an even share is ${Math.round(100 / experts)} %. Columns that differ mean that experts have found times of their own; a dark row is an expert that nobody asks.`);
}

function showGates(body, inside) {
  if (!inside.gate) return absent(body, "Gates", "this network has no gates (gate_type)", "hint");
  const layers = inside.gate[0].length, bins = inside.gate[0][0].length;
  const centres = Array.from({ length: bins }, (_, bin) => (bin + 0.5) / bins);
  const looks = [0, inside.time.length >> 1, inside.time.length - 1];
  const colours = ["#21a08c", "#5b78d6", "#d9772b"];
  chart(body, gridHeight(layers), () => layerGrid(layers, (layer) => ({
    series: looks.map((look, item) => ({
      x: centres, y: inside.gate[look][layer], mode: "lines", line: { shape: "hvh", width: 1.6, color: colours[item] }, fill: "tozeroy", fillcolor: `${colours[item]}22`,
      hovertemplate: `t = ${inside.time[look]}<br>open %{x:.2f}: %{y:.1%}<extra></extra>`,
    })),
    x: axis("open share of the gate", { range: [0, 1] }), y: axis("", { tickformat: ".0%", rangemode: "tozero" }),
  })), "Gates", `How far the gates of attention are open, over heads and cells, at t = ${looks.map((look, item) => `${inside.time[look]} (${["green", "blue", "orange"][item]})`).join(", ")}. All at 1 means that nothing is filtered.`);
}

function showInside() {
  const { inside } = data;
  const body = bodyOf("inside");
  if (!inside) return absent(body, "Not shown", data.missing.inside);
  document.getElementById("inside-words").textContent = `What the layers do with ${inside.cells.toLocaleString("en")} cells of slice ${inside.slice}, noised to t = ${inside.time.join(", ")} (0: clean, 1: pure noise).`;
  const experts = body.appendChild(element("div"));
  showExperts(experts, inside);
  const gates = body.appendChild(element("div", { style: "margin-top: 18px" }));
  showGates(gates, inside);
  const row = body.appendChild(element("div", { className: "row", style: "grid-template-columns: repeat(auto-fit, minmax(380px, 1fr))" }));
  const map = row.appendChild(element("div", { className: "chart" }, element("h3", { text: "Attention received" })));
  const choices = inside.attention.map((entry, layer) => ({ ...byValue(`Layer ${layer + 1}`, entry, 1, INFERNO, "even shares"), group: "Layers" }));
  tissues(map, { panels: [{ title: "", position: inside.position }], choices, slices: [], sliceOf: null, linked: false, height: 340, cells: () => [] });
  map.append(element("p", { className: "hint", text: "How much the others look at a cell, averaged over times; 1 is an even share." }));
  chart(row, 400, () => ({
    traces: inside.ranked.share.map((share, layer) => ({ x: inside.ranked.rank, y: share, mode: "lines", line: { width: 2, color: mixed(VIRIDIS, layer / Math.max(1, inside.ranked.share.length)) }, hovertemplate: `layer ${layer + 1}<br>rank %{x}: %{y:.2f}<extra></extra>` })),
    layout: { xaxis: axis("cells, most looked at first", { type: "log", dtick: 1 }), yaxis: axis("even shares", { rangemode: "tozero" }) },
  }), "Attention, ranked", "Dark to bright: first to last layer. A curve that starts very high has attention sinks: a few cells that everybody looks at.");
}

async function main() {
  await unpackKnown();
  showHead();
  for (const show of data.generated ? [showGenerated] : [showScores, showPositions, showPath, showErrors, showPredicted, showNew, showTraining, showInside]) show();
  document.body.dataset.state = "ready";
}
main();
