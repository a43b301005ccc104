// Runs before the first paint, so that a chosen theme never flashes.
(() => {
  try {
    const theme = localStorage.getItem("fledge-theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // Storage may be forbidden; the system's theme it is.
  }
})();
