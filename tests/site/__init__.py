"""The documentation's site in a browser: Debian's Chromium, driven by Playwright."""
