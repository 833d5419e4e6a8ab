// Answers of Prometheus as Grafana's data frames, with the panel's transformations and field configuration applied.

import {
  applyFieldOverrides,
  cacheFieldDisplayNames,
  createDataFrame,
  FieldConfigOptionsRegistry,
  FieldType,
  standardTransformers,
  standardTransformersRegistry,
  transformDataFrame,
} from "@grafana/data";
import { firstValueFrom } from "rxjs";

standardTransformersRegistry.setInit(() =>
  [standardTransformers.mergeTransformer, standardTransformers.organizeFieldsTransformer].map((transformation) => ({
    id: transformation.id,
    name: transformation.name,
    transformation: () => Promise.resolve(transformation),
  })),
);

const CURVES = {
  drawStyle: "line",
  lineInterpolation: "linear",
  lineWidth: 1,
  fillOpacity: 0,
  gradientMode: "none",
  spanNulls: false,
  showPoints: "auto",
  pointSize: 5,
  barAlignment: 0,
  stacking: { mode: "none", group: "A" },
  axisPlacement: "auto",
  scaleDistribution: { type: "linear" },
  thresholdsStyle: { mode: "off" },
};
const DEFAULTS = {
  color: { mode: "palette-classic" },
  thresholds: { mode: "absolute", steps: [{ color: "green", value: null }] },
  custom: {},
};

/** Defaults of a panel's plug-in for options that the dashboard does not set. */
function defaultsOf(panel) {
  const own = panel.fieldConfig.defaults;
  const custom = { ...(panel.type === "timeseries" ? CURVES : {}), ...own.custom };
  return { ...DEFAULTS, ...own, custom };
}

/** Accepts every property unchanged, like those of Grafana's own plug-ins. */
function registryOf(config) {
  const ids = new Set([
    ...Object.keys(config.defaults).filter((id) => id !== "custom"),
    ...Object.keys(config.defaults.custom).map((id) => `custom.${id}`),
    ...config.overrides.flatMap((override) => override.properties.map((property) => property.id)),
  ]);
  const item = (id) => ({
    id,
    path: id.replace(/^custom\./, ""),
    name: id,
    isCustom: id.startsWith("custom."),
    shouldApply: () => true,
    process: (value) => value,
    getItemsCount: () => 1,
  });
  return new FieldConfigOptionsRegistry(() => [...ids].map(item));
}

const milliseconds = (seconds) => Math.round(1000 * seconds);
const number = (text) => (text === "NaN" ? null : Number(text.replace("Inf", "Infinity")));

/** One frame for each series: its times and its values. */
function curves({ refId, series }) {
  return series.map(({ metric, name, points }) =>
    createDataFrame({
      refId,
      fields: [
        { name: "Time", type: FieldType.time, values: points.map(([at]) => milliseconds(at)) },
        {
          name: "Value",
          type: FieldType.number,
          labels: metric,
          config: { displayNameFromDS: name },
          values: points.map(([, value]) => number(value)),
        },
      ],
    }),
  );
}

/** One frame for all series: a column for each label. */
function rows({ refId, series }, several) {
  if (!series.length) return [];
  const labels = [...new Set(series.flatMap(({ metric }) => Object.keys(metric)))];
  const last = series.map(({ points }) => points.at(-1));
  return [
    createDataFrame({
      refId,
      fields: [
        { name: "Time", type: FieldType.time, values: last.map(([at]) => milliseconds(at)) },
        ...labels.map((label) => ({
          name: label,
          type: FieldType.string,
          values: series.map(({ metric }) => metric[label] ?? ""),
        })),
        {
          name: several ? `Value #${refId}` : "Value",
          type: FieldType.number,
          values: last.map(([, value]) => number(value)),
        },
      ],
    }),
  ];
}

export async function framesOf(panel, answers, theme) {
  const plain = answers.flatMap((answer) =>
    panel.type === "table" ? rows(answer, answers.length > 1) : curves(answer),
  );
  const transformed = panel.transformations
    ? await firstValueFrom(transformDataFrame(panel.transformations, plain, { interpolate: (text) => text }))
    : plain;
  const fieldConfig = { defaults: defaultsOf(panel), overrides: panel.fieldConfig.overrides ?? [] };
  const data = applyFieldOverrides({
    data: transformed,
    fieldConfig,
    fieldConfigRegistry: registryOf(fieldConfig),
    replaceVariables: (text) => text,
    theme,
    timeZone: "utc",
  });
  cacheFieldDisplayNames(data);
  return { data, fieldConfig };
}
