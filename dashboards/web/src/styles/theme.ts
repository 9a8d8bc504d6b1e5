import { createTheme, Tooltip } from "@mantine/core";

/**
 * React, Mantine and uPlot are what Prometheus makes its own page of: operators know how its
 * controls behave, keyboard and screen reader included.
 *
 * Whatever would add a <style> element at run time is off: the page's policy refuses it.
 */
export const theme = createTheme({
  primaryColor: "teal",
  defaultRadius: "md",
  cursorType: "pointer",
  components: {
    Tooltip: Tooltip.extend({ defaultProps: { withArrow: true, openDelay: 200 } }),
  },
});
