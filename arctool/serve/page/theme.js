// Light, dark or as the system says. Not a module: it runs before the first paint, so that no page flashes in the wrong colours.
"use strict";

window.arctoolTheme = {
  read() {
    try {
      const theme = localStorage.getItem("arctool.theme");
      return theme === "light" || theme === "dark" ? theme : "system";
    } catch {
      return "system";
    }
  },
  apply(theme) {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  },
  choose(theme) {
    this.apply(theme);
    try {
      localStorage.setItem("arctool.theme", theme);
    } catch {
      // A browser without storage keeps the theme for as long as the page is open.
    }
  },
};
window.arctoolTheme.apply(window.arctoolTheme.read());
