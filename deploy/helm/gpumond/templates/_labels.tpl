{{- define "gpumond.name" -}}
{{- if contains "gpumond" .Release.Name }}{{ .Release.Name | trunc 53 | trimSuffix "-" }}{{ else }}{{ printf "%s-gpumond" (.Release.Name | trunc 45 | trimSuffix "-") }}{{ end }}
{{- end }}

{{- define "gpumond.selector" -}}
app.kubernetes.io/name: gpumond
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "gpumond.labels" -}}
{{ include "gpumond.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "gpumond.metadata" -}}
name: {{ include "gpumond.name" . }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "gpumond.labels" . | nindent 2 }}
{{- end }}

{{- define "gpumond.config" -}}
{{ toYaml (merge (dict "insecure" true) .Values.config) }}
{{- end }}
