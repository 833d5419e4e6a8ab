// A dashboard, drawn with Grafana's own components: window.draw({ board, answers, chosen, from, to, mode }).
// data-state of a panel is its result: drawn, empty, failed, or left (there is no component for it).

import {
  createTheme,
  dateTime,
  FieldType,
  getDisplayValueAlignmentFactors,
  getFieldDisplayValues,
  ThemeContext,
} from "@grafana/data";
import {
  BarGauge,
  BigValue,
  GlobalStyles,
  PanelChrome,
  TimeSeries,
  TooltipDisplayMode,
  VizRepeater,
} from "@grafana/ui";
import { TableNG } from "@grafana/ui/unstable";
import { Component } from "react";
import { createRoot } from "react-dom/client";
import { framesOf } from "./frames.js";

const [CELL, GAP] = [30, 8];

function Curves({ panel, data, width, height, range }) {
  const legend = panel.options.legend;
  return (
    <TimeSeries
      frames={data}
      width={width}
      height={height}
      timeRange={range}
      timeZone="utc"
      legend={legend}
      options={{ tooltip: { mode: TooltipDisplayMode.None } }}
    />
  );
}

/** The values of a panel that shows one number for each field. */
function valuesOf(panel, data, fieldConfig, theme) {
  const replaceVariables = (text) => text;
  return getFieldDisplayValues({
    fieldConfig,
    reduceOptions: panel.options.reduceOptions,
    replaceVariables,
    theme,
    data,
    timeZone: "utc",
  });
}

function Figure({ panel, data, fieldConfig, width, height, theme }) {
  const [value] = valuesOf(panel, data, fieldConfig, theme);
  const { colorMode, graphMode, justifyMode, textMode } = panel.options;
  return (
    <BigValue
      value={{ ...value.display, title: undefined }}
      width={width}
      height={height}
      theme={theme}
      colorMode={colorMode}
      graphMode={graphMode}
      justifyMode={justifyMode ?? "auto"}
      textMode={textMode ?? "auto"}
      count={1}
    />
  );
}

function Bars({ panel, data, fieldConfig, width, height, theme }) {
  const { orientation, displayMode, showUnfilled, namePlacement, text, maxVizHeight } = panel.options;
  return (
    <VizRepeater
      getValues={() => valuesOf(panel, data, fieldConfig, theme)}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      renderValue={({ value, width, height, alignmentFactors }) => (
        <BarGauge
          value={value.display}
          field={value.field}
          display={value.view?.getFieldDisplayProcessor(value.colIndex)}
          width={width}
          height={height}
          theme={theme}
          alignmentFactors={alignmentFactors}
          {...{ orientation, displayMode, showUnfilled, namePlacement, text }}
        />
      )}
      source={data}
      width={width}
      height={height}
      maxVizHeight={maxVizHeight}
      itemSpacing={8}
      autoGrid
      orientation={orientation}
      renderCounter={0}
    />
  );
}

function Rows({ panel, data, fieldConfig, width, height, range }) {
  return (
    <TableNG
      data={data[0]}
      width={width}
      height={height}
      cellHeight={panel.options.cellHeight ?? "sm"}
      columnMinWidth={panel.fieldConfig.defaults.custom?.minWidth}
      initialSortBy={panel.options.sortBy}
      timeRange={range}
      fieldConfig={fieldConfig}
      structureRev={1}
    />
  );
}

const DRAWN_BY = { timeseries: Curves, stat: Figure, bargauge: Bars, table: Rows };

class Guard extends Component {
  state = { error: null };
  static getDerivedStateFromError(error) {
    return { error };
  }
  render() {
    return this.state.error ? <div data-state="failed">{String(this.state.error.stack)}</div> : this.props.children;
  }
}

const isEmpty = (data) => !data.some((frame) => frame.fields.some(hasValues));
const hasValues = (field) => field.type !== FieldType.time && field.values.some((value) => value !== null);

function Inside({ panel, prepared, width, height, range, theme }) {
  const Drawn = DRAWN_BY[panel.type];
  if (!Drawn) return <div data-state="left">{panel.type}</div>;
  if (isEmpty(prepared.data) && !panel.fieldConfig.defaults.noValue) return <div data-state="empty">No data</div>;
  return (
    <div data-state="drawn">
      <Drawn {...{ panel, width, height, range, theme }} {...prepared} />
    </div>
  );
}

const filled = (title, chosen) => title.replace(/\$(\w+)/g, (whole, name) => chosen[name]?.join(" + ") ?? whole);

function Panel({ panel, chosen, width, ...rest }) {
  const { x, y, w, h } = panel.gridPos;
  const column = (width - 23 * GAP) / 24;
  const box = { width: w * column + (w - 1) * GAP, height: h * CELL + (h - 1) * GAP };
  const place = { position: "absolute", left: x * (column + GAP), top: y * (CELL + GAP), ...box };
  if (panel.type === "row") return <h4 style={{ ...place, lineHeight: `${CELL}px` }}>{panel.title}</h4>;
  return (
    <div style={place} data-panel={panel.title} data-kind={panel.type}>
      <PanelChrome title={filled(panel.title, chosen)} description={panel.description} {...box}>
        {(innerWidth, innerHeight) => (
          <Guard>
            <Inside panel={panel} width={innerWidth} height={innerHeight} {...rest} />
          </Guard>
        )}
      </PanelChrome>
    </div>
  );
}

function Board({ board, prepared, ...rest }) {
  const rows = Math.max(...board.panels.map(({ gridPos }) => gridPos.y + gridPos.h));
  return (
    <div id="board" style={{ position: "relative", width: rest.width, height: rows * (CELL + GAP), margin: GAP }}>
      {board.panels.map((panel) => (
        <Panel key={panel.id} panel={panel} prepared={prepared[panel.id]} {...rest} />
      ))}
    </div>
  );
}

let root;

window.draw = async ({ board, answers, chosen, from, to, mode }) => {
  const theme = createTheme({ colors: { mode } });
  const range = { from: dateTime(1000 * from), to: dateTime(1000 * to), raw: { from: "now-5m", to: "now" } };
  const prepared = {};
  for (const panel of board.panels)
    if (panel.type !== "row") prepared[panel.id] = await framesOf(panel, answers[panel.id], theme);
  root?.unmount();
  root = createRoot(document.getElementById("root"));
  root.render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <Board {...{ board, prepared, chosen, range, theme }} width={window.innerWidth - 2 * GAP} />
    </ThemeContext.Provider>,
  );
};
