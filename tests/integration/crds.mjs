// Validates objects with the schemas of the Prometheus operator's resources, compiled to functions in build/crds.
// A schema accepts unknown keys, which the API server drops silently. So each object is wrapped in a proxy:
// keys that its schema did not read are unknown.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const schemas = `${pathToFileURL(process.argv[2])}/node_modules/@kubernetes-models/prometheus-operator/_schemas`;

function watched(value, path, unseen) {
  if (value === null) unseen.add(`${path} is null`);
  if (value === null || typeof value !== "object") return value;
  const inside = Array.isArray(value) ? [] : {};
  for (const [key, entry] of Object.entries(value)) {
    unseen.add(`${path}/${key} is unknown`);
    inside[key] = watched(entry, `${path}/${key}`, unseen);
  }
  return new Proxy(inside, {
    get(target, key) {
      unseen.delete(`${path}/${String(key)} is unknown`);
      return target[key];
    },
  });
}

async function complaints(object) {
  const version = object.apiVersion.split("/").map((part) => part.split(".").map(capital).join("")).join("");
  const { validate } = await import(`${schemas}/${version}${object.kind}.js`);
  const unseen = new Set();
  const wrong = validate(watched(object, "", unseen)) ? [] : validate.errors;
  return [...unseen, ...wrong.map((error) => `${error.instancePath} ${error.keyword} ${JSON.stringify(error.params)}`)];
}

const capital = (word) => word[0].toUpperCase() + word.slice(1);
const objects = JSON.parse(readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(await Promise.all(objects.map(complaints))));
