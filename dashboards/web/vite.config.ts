import react from "@vitejs/plugin-react";
import { defineConfig } from "vite";

/** Names without hashes: what is committed keeps its name, and the server sends an ETag. */
export default defineConfig({
  base: "./",
  plugins: [react()],
  worker: { format: "es", rollupOptions: { output: { entryFileNames: "assets/[name].js" } } },
  build: {
    outDir: "../page",
    emptyOutDir: true,
    license: { fileName: "licenses.md" },
    target: "es2022",
    modulePreload: false,
    assetsInlineLimit: 0,
    reportCompressedSize: false,
    chunkSizeWarningLimit: 2_000,
    rollupOptions: {
      output: {
        entryFileNames: "assets/page.js",
        chunkFileNames: "assets/[name].js",
        assetFileNames: "assets/[name][extname]",
      },
    },
  },
  server: { proxy: { "/v1": "http://127.0.0.1:8420" } },
});
