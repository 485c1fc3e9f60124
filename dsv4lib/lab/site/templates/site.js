"use strict";
// Searches all pages. The index is a script that is loaded when the box is first used; nothing is fetched.
(() => {
  const box = document.querySelector(".search");
  const input = box.querySelector("input");
  const found = box.querySelector("#found");
  const MOST = 30;
  let index = null;
  let asked = false;

  function load() {
    if (asked) return;
    asked = true;
    const script = document.createElement("script");
    script.src = "search-index.js";
    script.onload = () => {
      const { pages, sections } = window.DSV4_SEARCH;
      index = sections.map(([page, anchor, heading, text]) => {
        const [file, title] = pages[page];
        return { file, anchor, heading, text, title, low: text.toLowerCase(), head: `${title} ${heading}`.toLowerCase() };
      });
      show();
    };
    script.onerror = () => say("search-index.js is missing beside this page.");
    document.head.append(script);
  }

  function say(words) {
    const line = document.createElement("p");
    line.textContent = words;
    found.replaceChildren(line);
  }

  function score(section, words) {
    let sum = 0;
    for (const word of words) {
      const inHead = section.head.includes(word);
      const times = section.low.split(word).length - 1;
      if (!inHead && !times) return 0;
      sum += (inHead ? 20 : 0) + Math.min(times, 8);
    }
    return sum;
  }

  function marked(text, words) {
    // Text nodes and marks only: what a page says is never read as HTML.
    const low = text.toLowerCase();
    const nodes = [];
    let at = 0;
    while (at < text.length) {
      const hits = words.map((word) => [low.indexOf(word, at), word.length]).filter(([start]) => start >= 0);
      if (!hits.length) break;
      const [start, length] = hits.sort((a, b) => a[0] - b[0] || b[1] - a[1])[0];
      const mark = document.createElement("mark");
      mark.textContent = text.slice(start, start + length);
      nodes.push(text.slice(at, start), mark);
      at = start + length;
    }
    return [...nodes, text.slice(at)];
  }

  function excerpt(section, words) {
    const places = words.map((word) => section.low.indexOf(word)).filter((place) => place >= 0);
    const start = Math.max(0, (places.length ? Math.min(...places) : 0) - 60);
    return `${start ? "… " : ""}${section.text.slice(start, start + 190)}${section.text.length > start + 190 ? " …" : ""}`;
  }

  function row(section, words) {
    const link = document.createElement("a");
    link.href = section.file + (section.anchor ? `#${encodeURIComponent(section.anchor)}` : "");
    const name = section.heading ? `${section.title}: ${section.heading}` : section.title;
    const small = document.createElement("small");
    small.append(...marked(excerpt(section, words), words));
    link.append(...marked(name, words), small);
    const item = document.createElement("li");
    item.append(link);
    return item;
  }

  function show() {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return found.replaceChildren();
    if (!index) return say("Loading the index …");
    const hits = index.map((section) => [score(section, words), section]).filter(([points]) => points);
    hits.sort((a, b) => b[0] - a[0]);
    say(hits.length ? `${hits.length} section${hits.length > 1 ? "s" : ""}` : "Nothing found.");
    const list = document.createElement("ol");
    list.append(...hits.slice(0, MOST).map(([, section]) => row(section, words)));
    found.append(list);
  }

  const side = document.querySelector(".side");
  const current = side.querySelector("[aria-current]");
  if (current) side.scrollTop = current.offsetTop - side.clientHeight / 3;

  box.hidden = false;
  input.addEventListener("focus", load);
  input.addEventListener("input", () => { load(); show(); });
  found.addEventListener("click", (event) => { if (event.target.closest("a")) found.replaceChildren(); });
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, textarea, select");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      input.focus();
    }
    if (event.key === "Escape") { input.value = ""; found.replaceChildren(); }
  });
  document.addEventListener("click", (event) => { if (!box.contains(event.target)) found.replaceChildren(); });
})();
