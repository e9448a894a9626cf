// Moving pictures: tissues that can be rotated and coloured, and the path from noise.
"use strict";

/**
 * One or two tissues beside one another, zoomed and rotated together.
 *
 * panels: [{title, position, marked}], of packed coordinates and 1 for cells to ring in the plane; choices: [{label, group, types | low, high, colours, arrays}],
 * where arrays() promises one array a panel; cells: what is shown of a cell under the pointer;
 * stretched: whether the colours of a panel are no values of the scale.
 */
class Tissues {
  constructor(parent, { panels, choices, slices, sliceOf, dims, cells, types, linked, height, stretched, first = 0 }) {
    Object.assign(this, { panels, choices, slices, sliceOf, dims, cells, types, linked, stretched, highlight: null });
    this.view = dims === 3 ? "3D" : "2D";
    this.slice = first;
    this.choice = choices[0];
    this.plot = element("div", { className: "plot" });
    this.ring = element("div", { className: "ring", hidden: true });
    this.stage = element("div", { className: "stage" }, this.plot, this.ring);
    this.stage.style.height = `${height}px`;
    this.legend = element("div", { className: "legend" });
    const titles = element("div", { className: "panel-titles" }, ...panels.map((panel) => element("h3", { text: panel.title })));
    parent.append(this.controls(), this.legend, titles, this.stage);
    whenSeen(this.stage, () => { redraws.add(this.redraw); this.draw(); }, () => { redraws.delete(this.redraw); Plotly.purge(this.plot); this.plot.dataset.state = "cleared"; });
  }

  redraw = () => this.draw();

  controls() {
    const row = element("div", { className: "controls" });
    this.colourSelect = element("select", { className: "colour" });
    const groups = new Map();
    this.choices.forEach((choice, index) => {
      if (!groups.has(choice.group)) {
        groups.set(choice.group, element("optgroup", { label: choice.group }));
        this.colourSelect.append(groups.get(choice.group));
      }
      groups.get(choice.group).append(element("option", { value: String(index), text: choice.label }));
    });
    this.colourSelect.addEventListener("change", () => this.choose(Number(this.colourSelect.value)));
    if (this.choices.length > 1) row.append(element("label", { text: "Colour" }, this.colourSelect));
    if (this.slices.length > 1) {
      const select = element("select", { className: "slice" }, ...this.slices.map((name, index) => element("option", { value: String(index), text: name })), element("option", { value: "-1", text: `All ${this.slices.length} slices` }));
      select.value = String(this.slice);
      select.addEventListener("change", () => { this.slice = Number(select.value); this.draw(); });
      row.append(element("label", { text: "Slice" }, select));
    }
    row.append(segments(["2D", "3D"], this.view, (view) => { this.view = view; this.draw(); }));
    row.append(saveButton(this.plot, this.panels[this.panels.length - 1].title || "tissue", "png"));
    return row;
  }

  choose(index) {
    this.choice = this.choices[index];
    this.colourSelect.value = String(index);
    this.highlight = null;
    this.onChoice?.(index);
    return this.draw();
  }

  /** The cells to draw: of one slice, or all. */
  async rows() {
    if (!this.sliceOf || this.slices.length < 2) return null;
    const slice = await unpack(this.sliceOf);
    const rows = [];
    for (let row = 0; row < slice.length; row += 1) if (this.slice < 0 || Math.round(slice[row]) === this.slice) rows.push(row);
    return Uint32Array.from(rows);
  }

  /** Coordinates of the drawn cells; 2D slices are set apart, so that all of them can be seen at once. */
  async coordinates(panel, rows) {
    const position = await unpackPosition(panel.position);
    const pick = (values) => picked(values, rows);
    const coordinates = { x: pick(position.x), y: pick(position.y), z: pick(position.z) };
    if (this.dims === 2) {
      // By the first panel's size on both sides, so that a slice has the same position in each.
      const { x, y } = this.panels[0].position;
      const gap = (x.high - x.low) * Math.min(0.5, 1.1 / Math.max(1, this.slices.length - 1));
      const slice = this.slice < 0 ? pick(await unpack(this.sliceOf)) : null;
      coordinates.z = coordinates.x.map((_, index) => (slice ? slice[index] * gap : 0));
      if (slice && this.view === "2D") this.sideBySide(coordinates, slice, { x, y });
    }
    return coordinates;
  }

  /** In the plane, slices stand in rows and columns. */
  sideBySide(coordinates, slice, { x, y }) {
    const columns = Math.ceil(Math.sqrt(this.slices.length));
    coordinates.x = coordinates.x.map((value, index) => value + (Math.round(slice[index]) % columns) * 1.05 * (x.high - x.low));
    coordinates.y = coordinates.y.map((value, index) => value - Math.floor(Math.round(slice[index]) / columns) * 1.05 * (y.high - y.low));
  }

  async draw() {
    const ticket = (this.ticket = (this.ticket || 0) + 1);
    this.plot.dataset.state = "drawing";
    const rows = await this.rows();
    const arrays = await this.choice.arrays();
    const positions = await Promise.all(this.panels.map((panel) => this.coordinates(panel, rows)));
    this.rings = await Promise.all(this.panels.map(async ({ marked }) => (marked ? picked(await unpack(marked), rows) : null)));
    if (ticket !== this.ticket) return;
    this.drawn = { rows, positions, arrays };
    const pick = (values) => picked(values, rows);
    const planar = this.view === "2D";
    const traces = positions.map((position, index) => this.trace(position, pick(arrays[index]), index, planar));
    if (this.kind !== this.view) { Plotly.purge(this.plot); this.kind = this.view; }
    await Plotly.react(this.plot, traces, this.layout(planar, positions), CONFIG);
    this.listen();
    this.drawLegend();
    this.ring.hidden = true;
    this.plot.dataset.state = "drawn";
    this.plot.dataset.colour = this.choice.label;
  }

  trace(position, values, index, planar) {
    const number = index ? String(index + 1) : "";
    const { highlight } = this;
    const types = this.choice.names || this.types;
    const chosen = this.choice.types && highlight !== null ? values.map((code) => (Math.round(code) === highlight ? code : -1)) : values;
    const size = Math.min(9, Math.max(1.6, 0.62 * Math.sqrt((150000 * (this.panels.length === 1 ? 1.2 : 1)) / (values.length * (this.slice < 0 ? 2 : 1)))));
    const marker = {
      color: chosen, size: planar ? size : Math.max(1.5, size * 0.62), opacity: values.length > 30000 ? 0.8 : 0.92,
      line: planar && this.rings[index] ? { color: cssColour("--ink"), width: Array.from(this.rings[index], (mark) => (mark > 0.5 ? 1.2 : 0)) } : { width: 0 },
      ...(this.choice.types ? { colorscale: typeScale(types.length), cmin: -1.5, cmax: types.length - 0.5 } : { colorscale: valueScale(this.scaleOf(index).colours), cmin: -1, cmax: 1 }),
    };
    const common = { mode: "markers", x: position.x, y: position.y, marker, hoverinfo: "none" };
    return planar ? { type: "scattergl", xaxis: `x${number}`, yaxis: `y${number}`, ...common } : { type: "scatter3d", z: position.z, scene: `scene${number}`, ...common };
  }

  /** Ends, colours and unit of a panel: its own, where a choice has one a panel. */
  scaleOf(index) {
    return this.choice.scales ? this.choice.scales[index] : this.choice;
  }

  /** Ends of the axes in space, the same for both sides, and the shape of the box; planar tissue gets some depth. */
  box(positions) {
    const ends = {}, sizes = {};
    for (const name of ["x", "y", "z"]) {
      let [low, high] = [Infinity, -Infinity];
      for (const position of positions) for (const value of position[name]) { if (value < low) low = value; if (value > high) high = value; }
      ends[name] = [low, high];
    }
    const widest = Math.max(...Object.values(ends).map(([low, high]) => high - low)) || 1;
    for (const [name, [low, high]] of Object.entries(ends)) {
      const half = Math.max(high - low, 0.1 * widest) * 0.53;
      ends[name] = [(low + high) / 2 - half, (low + high) / 2 + half];
      sizes[name] = (1.25 * 2 * half) / (1.06 * widest);
    }
    return { ends, sizes };
  }

  /** From the side and above, the farther the deeper the tissue is; one panel is wide, and needs a distance for its height. */
  firstLook(sizes) {
    const far = (0.95 + 0.4 * sizes.z) * (this.panels.length === 1 ? 1.35 : 1);
    return { eye: { x: 0.62 * far, y: -1.05 * far, z: 0.85 * far } };
  }

  layout(planar, positions) {
    const box = planar ? null : this.box(positions);
    const both = this.panels.length === 2;
    const uirevision = `${this.view}/${this.slice}`;
    const layout = baseLayout({ uirevision, dragmode: planar ? "zoom" : "orbit" });
    this.panels.forEach((_, index) => {
      const number = index ? "2" : "";
      const domain = both ? [[0, 0.495], [0.505, 1]][index] : [0, 1];
      if (planar) {
        const plain = { showgrid: false, zeroline: false, showticklabels: false, ticks: "", uirevision };
        layout[`xaxis${number}`] = { ...plain, domain, anchor: `y${number}`, ...(index ? { matches: "x" } : {}) };
        layout[`yaxis${number}`] = { ...plain, anchor: `x${number}`, ...(index ? { matches: "y" } : { scaleanchor: "x" }) };
      } else {
        const plain = { title: { text: "" }, showticklabels: false, showspikes: false, gridcolor: cssColour("--grid"), zerolinecolor: cssColour("--grid"), showbackground: false, ticks: "" };
        layout[`scene${number}`] = { domain: { x: domain, y: [0, 1] }, aspectmode: "manual", aspectratio: box.sizes, ...Object.fromEntries(["x", "y", "z"].map((name) => [`${name}axis`, { ...plain, range: box.ends[name] }])), uirevision, camera: this.camera || this.firstLook(box.sizes) };
      }
    });
    return layout;
  }

  /** Bind the pointer and, in 3D, rotate both scenes together. */
  listen() {
    const { plot } = this;
    plot.removeAllListeners?.("plotly_hover");
    plot.removeAllListeners?.("plotly_unhover");
    plot.removeAllListeners?.("plotly_relayouting");
    plot.removeAllListeners?.("plotly_relayout");
    plot.on("plotly_hover", ({ points: [point], event }) => this.hover(point, event));
    plot.on("plotly_unhover", () => { tip.hidden = true; this.ring.hidden = true; });
    const rotate = (change) => {
      const from = ["scene", "scene2"].find((scene) => `${scene}.camera` in change);
      if (!from || this.rotating || this.panels.length < 2) return;
      this.rotating = true;
      this.camera = change[`${from}.camera`];
      const other = from === "scene" ? "scene2" : "scene";
      Plotly.relayout(plot, { [`${other}.camera`]: this.camera }).finally(() => { this.rotating = false; });
    };
    plot.on("plotly_relayouting", rotate);
    plot.on("plotly_relayout", rotate);
  }

  hover(point, event) {
    const index = point.curveNumber;
    const row = this.drawn.rows ? this.drawn.rows[point.pointNumber] : point.pointNumber;
    const pointer = event?.clientX === undefined ? this.plot.getBoundingClientRect() : event;
    showTip({ clientX: pointer.clientX ?? pointer.left + 20, clientY: pointer.clientY ?? pointer.top + 20 }, [...this.cells(row, index), this.valueWords(row, index)]);
    if (this.linked && this.view === "2D" && this.panels.length === 2) this.mark(1 - index, point.pointNumber);
  }

  valueWords(row, index) {
    if (this.choice.types) return "";
    const share = this.drawn.arrays[index][row];
    const { label, low, high } = this.scaleOf(index);
    if (this.stretched?.(index)) return "";
    return share < 0 ? `${label}: not measured here` : `${label}: ${shortNumber(low + share * (high - low))}`;
  }

  /** Ring the same cell on the other side. */
  mark(index, number) {
    const layout = this.plot._fullLayout;
    const [x, y] = [layout[index ? "xaxis2" : "xaxis"], layout[index ? "yaxis2" : "yaxis"]];
    const position = this.drawn.positions[index];
    this.ring.style.left = `${x._offset + x.l2p(position.x[number])}px`;
    this.ring.style.top = `${y._offset + y.l2p(position.y[number])}px`;
    this.ring.hidden = false;
  }

  drawLegend() {
    if (this.choice.types) {
      this.legend.replaceChildren(...(this.choice.names || this.types).map((name, code) => {
        const dot = element("i");
        dot.style.background = typeColour(code);
        const chip = element("button", { className: "chip", type: "button", title: "Show this type alone" }, dot, element("span", { text: name }));
        chip.setAttribute("aria-pressed", String(this.highlight === code));
        chip.addEventListener("click", () => { this.highlight = this.highlight === code ? null : code; this.draw(); });
        return chip;
      }));
      return;
    }
    this.legend.replaceChildren(...(this.choice.scales || [this.choice]).map(({ label, low, high, colours, unit }) => {
      const strip = element("i");
      strip.style.background = `linear-gradient(90deg, ${colours.join(", ")})`;
      return element("div", { className: "scale" }, element("span", { text: `${label}${unit ? ` (${unit})` : ""}` }), element("span", { text: shortNumber(low) }), strip, element("span", { text: shortNumber(high) }));
    }));
  }
}

/** The denoising path: two clouds of points, a slider and a button. */
class Player {
  constructor(parent, path, types) {
    Object.assign(this, { path, types, frame: path.time.length - 1, timer: null });
    this.plot = element("div", { className: "plot" });
    this.stage = element("div", { className: "stage" }, this.plot);
    this.stage.style.height = "400px";
    this.button = element("button", { type: "button", className: "play", text: "▶ Play" });
    this.slider = element("input", { type: "range", min: "0", max: String(path.time.length - 1), value: String(this.frame) });
    this.slider.setAttribute("aria-label", "Step of the path");
    this.words = element("output");
    const titles = ["What the network sees", "What it predicts"].map((text) => element("h3", { text }));
    parent.append(element("div", { className: "panel-titles" }, ...titles), this.stage, element("div", { className: "player" }, this.button, this.slider, this.words));
    this.button.addEventListener("click", () => (this.timer ? this.pause() : this.play()));
    this.slider.addEventListener("input", () => { this.pause(); this.show(Number(this.slider.value)); });
    whenSeen(this.stage, () => { redraws.add(this.redraw); this.draw(); }, () => { this.pause(); redraws.delete(this.redraw); Plotly.purge(this.plot); this.ready = false; });
  }

  redraw = () => this.draw();

  async draw() {
    const { path } = this;
    this.ready = false;
    const parts = await Promise.all([path.noisy.x, path.noisy.y, path.clean.x, path.clean.y].map(unpack));
    const cut = (values, frame) => values.subarray(frame * path.cells, (frame + 1) * path.cells);
    this.at = (frame) => ({ x: [cut(parts[0], frame), cut(parts[2], frame)], y: [cut(parts[1], frame), cut(parts[3], frame)] });
    const codes = path.types && this.types ? await unpack(path.types) : null;
    const size = Math.min(8, Math.max(2, 0.62 * Math.sqrt(150000 / path.cells)));
    const marker = { size, opacity: 0.9, line: { width: 0 }, ...(codes ? { color: codes, colorscale: typeScale(this.types.length), cmin: -1.5, cmax: this.types.length - 0.5 } : { color: cssColour("--accent") }) };
    const { x, y } = this.at(this.frame);
    const traces = [0, 1].map((index) => ({ type: "scattergl", mode: "markers", x: x[index], y: y[index], xaxis: index ? "x2" : "x", yaxis: index ? "y2" : "y", marker, hoverinfo: "skip" }));
    const plain = { showgrid: false, zeroline: false, showticklabels: false, fixedrange: true };
    const [wide, high] = ["x", "y"].map((name) => this.range(path.clean[name], path.noisy[name]));
    await Plotly.react(this.plot, traces, baseLayout({
      xaxis: { ...plain, domain: [0, 0.495], range: wide }, xaxis2: { ...plain, domain: [0.505, 1], range: wide, anchor: "y2" },
      yaxis: { ...plain, scaleanchor: "x", range: high }, yaxis2: { ...plain, scaleanchor: "x2", anchor: "x2", range: high },
    }), { displayModeBar: false, responsive: true });
    this.ready = true;
    this.plot.dataset.state = "drawn";
    this.tell();
  }

  /** Ends that hold the tissue and most of the noise. */
  range(clean, noisy) {
    const middle = (clean.low + clean.high) / 2;
    const half = Math.max(clean.high - clean.low, 0.75 * (noisy.high - noisy.low)) * 0.54;
    return [middle - half, middle + half];
  }

  async show(frame) {
    this.frame = frame;
    this.slider.value = String(frame);
    this.tell();
    if (this.ready) await Plotly.restyle(this.plot, this.at(frame), [0, 1]);
    this.plot.dataset.frame = String(frame);
  }

  tell() {
    this.words.textContent = `step ${this.frame + 1} of ${this.path.time.length}, noise time ${this.path.time[this.frame].toFixed(2)}`;
  }

  play() {
    this.button.textContent = "❚❚ Pause";
    const last = this.path.time.length - 1;
    let next = this.frame >= last ? 0 : this.frame + 1;
    const step = async () => {
      await this.show(next);
      next += 1;
      if (next > last) { this.pause(); return; }
      if (this.timer) this.timer = setTimeout(step, 130);
    };
    this.timer = setTimeout(step, 0);
  }

  pause() {
    clearTimeout(this.timer);
    this.timer = null;
    this.button.textContent = "▶ Play";
  }
}
