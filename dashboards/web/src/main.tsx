import "@mantine/core/styles.css";
import "./styles/theme.css";
import "./styles/base.css";
import "./parts/parts.css";

import { MantineProvider } from "@mantine/core";
import { StrictMode } from "react";
import { createRoot } from "react-dom/client";

import { askEarly } from "./api/client";
import { takeEditToken } from "./api/editToken";
import { parseRoute } from "./route";
import { Shell } from "./shell/Shell";
import { theme } from "./styles/theme";
import { graphPath } from "./views/graph/graphPath";

takeEditToken();
const { view, params } = parseRoute(window.location.hash);
if (view === "graph") askEarly(graphPath(params));
const root = document.getElementById("page");
if (root === null) throw new Error("index.html has no #page");

/** Styles are files: the page's Content-Security-Policy allows no others. */
createRoot(root).render(
  <StrictMode>
    <MantineProvider
      theme={theme}
      defaultColorScheme="auto"
      withCssVariables={false}
      withGlobalClasses={false}
    >
      <Shell />
    </MantineProvider>
  </StrictMode>,
);
