import "@mantine/core/styles.css";
import "./styles/theme.css";
import "./styles/base.css";
import "./parts/parts.css";

import { MantineProvider } from "@mantine/core";
import { StrictMode } from "react";
import { createRoot } from "react-dom/client";

import { takeEditToken } from "./api/editToken";
import { Shell } from "./shell/Shell";
import { theme } from "./styles/theme";

takeEditToken();
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
