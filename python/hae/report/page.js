'use strict';
(async () => {
  const $ = (id) => document.getElementById(id);
  const templates = JSON.parse($('templates').textContent);
  const config = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ['select2d', 'lasso2d'] };
  const printing = { active: false };
  const plots = []; // every drawn place: {canvas, figure}

  /** The JSON that a script element holds compressed. */
  async function unpacked(element) {
    const bytes = Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
    return new Response(stream).json();
  }

  // ------------------------------------------------------------------------------------- theme

  const system = matchMedia('(prefers-color-scheme: dark)');
  let chosen = null; // what the reader chose, else the system's
  const isDark = () => (chosen ?? system.matches) && !printing.active;

  function applyTheme() {
    document.documentElement.classList.toggle('dark', isDark());
    document.documentElement.classList.toggle('paper', printing.active);
    $('theme').setAttribute('aria-pressed', String(isDark()));
    return Promise.all(plots.map(draw));
  }
  $('theme').addEventListener('click', () => { chosen = !isDark(); applyTheme(); });
  system.addEventListener('change', applyTheme);

  // ------------------------------------------------------------------------------------- plots

  function draw(place) {
    if (!place.figure) return null;
    const layout = { ...structuredClone(place.figure.layout), template: templates[isDark() ? 'dark' : 'light'] };
    if (printing.active) Object.assign(layout, { width: place.canvas.clientWidth, autosize: false, height: Math.min(0.9 * layout.height, 780) });
    if (layout.meta?.ratio) layout.height = place.canvas.clientWidth * layout.meta.ratio;
    return Plotly.react(place.canvas, place.figure.data, layout, config);
  }

  function placeOf(canvas) {
    const place = { canvas, figure: null };
    plots.push(place);
    return place;
  }

  async function drawOverview(element) {
    const figures = await unpacked(element.querySelector('script'));
    if (!figures.length) return;
    const place = placeOf(element.querySelector('.canvas'));
    const select = element.querySelector('select');
    place.figure = figures[0];
    if (select) select.addEventListener('change', () => { place.figure = figures[select.selectedIndex]; draw(place); });
    await draw(place);
  }

  // Paper is light and narrow, whatever the screen is.
  window.addEventListener('beforeprint', () => { printing.active = true; applyTheme(); });
  window.addEventListener('afterprint', () => { printing.active = false; applyTheme(); });

  // ------------------------------------------------------------------------------------- tables

  function valueOf(row, column) {
    const cell = row.cells[column];
    const value = cell.dataset.value;
    return value === undefined ? cell.textContent.trim() : value === '' ? null : Number(value);
  }

  function compare(a, b) {
    return typeof a === 'string' ? a.localeCompare(b, 'en', { numeric: true }) : a - b;
  }

  /** Rows in the order of a column; what has no value comes last, either way. */
  function sort(table, header) {
    const column = header.cellIndex;
    const ascending = header.getAttribute('aria-sort') !== 'ascending';
    for (const other of header.parentNode.cells) other.setAttribute('aria-sort', 'none');
    header.setAttribute('aria-sort', ascending ? 'ascending' : 'descending');
    const rows = [...table.tBodies[0].rows].map((row) => [valueOf(row, column), row]);
    rows.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null);
      return ascending ? compare(a, b) : compare(b, a);
    });
    table.tBodies[0].append(...rows.map(([, row]) => row));
  }
  for (const table of document.querySelectorAll('table.sortable')) {
    for (const header of table.tHead.rows[0].cells) {
      header.querySelector('button').addEventListener('click', () => sort(table, header));
    }
  }

  function filterRuns() {
    const policy = $('run-policy').value;
    const words = $('run-sequence').value.toLowerCase();
    const rows = [...$('runs').tBodies[0].rows];
    for (const row of rows) {
      row.hidden = (policy !== '' && row.dataset.policy !== policy) || !row.cells[0].textContent.toLowerCase().includes(words);
    }
    $('run-count').textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} runs`;
  }
  $('run-policy').addEventListener('change', filterRuns);
  $('run-sequence').addEventListener('input', filterRuns);
  filterRuns();

  if ($('copy')) {
    $('copy').addEventListener('click', async () => {
      getSelection().selectAllChildren($('command'));
      try { await navigator.clipboard.writeText($('command').textContent); } catch { document.execCommand('copy'); }
      $('copy').textContent = 'Copied';
    });
  }

  // --------------------------------------------------------------------------- one sequence

  function fill(select, names) {
    select.replaceChildren(...names.map((name, i) => new Option(name, i)));
  }

  async function drawDetails() {
    const sequences = await unpacked($('details'));
    const pictures = [...$('pictures').querySelectorAll('.canvas')].map(placeOf);
    const timeline = placeOf($('plot-timeline').querySelector('.canvas'));
    const sequence = () => sequences[$('detail-sequence').selectedIndex];
    let lanes = [];

    async function showStep() {
      for (const place of pictures) {
        const frame = place.figure.frames[$('picture-step').value];
        place.figure.data = [{ ...place.figure.data[0], z: frame.data[0].z }];
        $('picture-at').textContent = frame.name;
      }
      await Promise.all(pictures.map(draw));
    }

    async function showPicture() {
      const one = sequence().pictures[$('detail-picture').selectedIndex];
      const hasFigures = Boolean(one && one.figures.length);
      $('pictures').hidden = !hasFigures;
      $('picture-step').parentNode.hidden = !hasFigures;
      $('picture-note').textContent = one ? one.note : 'This sequence has no picture.';
      pictures.forEach((place, i) => { place.figure = hasFigures ? one.figures[i] : null; });
      if (!hasFigures) return;
      for (const { figure } of pictures) {
        figure.layout.images?.forEach((part, i) => { part.source = one.pixels[i]; });
        Object.assign(figure.layout, { title: {}, margin: { l: 2, r: 2, t: 2, b: 2 } }); // its name stands above
      }
      $('picture-step').max = one.figures[0].frames.length - 1;
      $('picture-step').value = $('picture-step').max;
      await showStep();
    }

    async function showTimeline() {
      timeline.figure = lanes[$('detail-lane').selectedIndex].figure;
      $('timeline-note').textContent = timeline.figure.layout.meta.note;
      fillTokens(timeline.figure.data[0].customdata);
      await search();
    }

    async function showPolicy() {
      const lane = $('detail-lane').value;
      lanes = sequence().timelines.filter((line) => line.policy === $('detail-policy').selectedIndex);
      fill($('detail-lane'), lanes.map((line) => line.lane));
      $('detail-lane').selectedIndex = lane < lanes.length ? lane : 0;
      await showTimeline();
    }

    /** Rows with these words, and their bars; the others grow pale. */
    async function search() {
      const words = $('token-search').value.toLowerCase();
      const rows = [...$('tokens').tBodies[0].rows];
      const found = new Set();
      for (const row of rows) {
        const position = row.cells[0].textContent;
        row.hidden = words !== '' && position !== words && !row.cells[1].textContent.toLowerCase().includes(words);
        if (!row.hidden) found.add(Number(position));
      }
      $('token-count').textContent = `${found.size} of ${rows.length} tokens`;
      for (const trace of timeline.figure.data) {
        trace.marker = { ...trace.marker, opacity: trace.y.map((position) => (found.has(position) ? 1 : 0.12)) };
      }
      await draw(timeline);
    }

    async function showSequence() {
      const pictures = sequence().pictures;
      fill($('detail-picture'), pictures.map((one) => one.name));
      $('picture-choice').hidden = pictures.length < 2;
      await showPicture();
      await showPolicy();
    }

    $('detail-sequence').addEventListener('change', showSequence);
    $('detail-picture').addEventListener('change', showPicture);
    $('picture-step').addEventListener('input', showStep);
    $('detail-policy').addEventListener('change', showPolicy);
    $('detail-lane').addEventListener('change', showTimeline);
    $('token-search').addEventListener('input', search);
    await showSequence();
  }

  const decoder = document.createElement('textarea');
  /** plotly's text is HTML; a table's is not. */
  function plain(text) {
    decoder.innerHTML = text;
    return decoder.value;
  }

  function fillTokens(lines) {
    const isText = [false, true, true, false, false, false, false, false];
    $('tokens').tBodies[0].replaceChildren(...lines.map((line) => {
      const row = document.createElement('tr');
      line.forEach((text, column) => {
        const cell = row.insertCell();
        cell.textContent = plain(text);
        if (!isText[column]) {
          cell.className = 'number';
          cell.dataset.value = text === '–' ? '' : text;
        }
      });
      return row;
    }));
    for (const header of $('tokens').tHead.rows[0].cells) header.setAttribute('aria-sort', 'none');
  }

  applyTheme();
  for (const element of document.querySelectorAll('figure.plot:has(> script)')) await drawOverview(element);
  if ($('details')) await drawDetails();
  document.documentElement.dataset.ready = 'yes';
})();
