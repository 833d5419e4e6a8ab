{{- define "gpumond.label" -}}
{{ .Values.nameOverride | default "gpumond" | trunc 45 | trimSuffix "-" }}
{{- end }}

{{- define "gpumond.name" -}}
{{- $label := include "gpumond.label" . }}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride | trunc 53 | trimSuffix "-" }}
{{- else if contains $label .Release.Name }}{{ .Release.Name | trunc 53 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" (.Release.Name | trunc (int (sub 52 (len $label))) | trimSuffix "-") $label }}
{{- end }}
{{- end }}

{{- define "gpumond.namespace" -}}
{{ .Values.namespaceOverride | default .Release.Namespace }}
{{- end }}

{{- define "gpumond.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary (include "gpumond.name" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{- define "gpumond.selector" -}}
app.kubernetes.io/name: {{ include "gpumond.label" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "gpumond.labels" -}}
{{ include "gpumond.selector" . }}
app.kubernetes.io/component: daemon
app.kubernetes.io/part-of: gpumond
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "gpumond.metadata" -}}
name: {{ include "gpumond.name" . }}
namespace: {{ include "gpumond.namespace" . }}
labels:
  {{- include "gpumond.labels" . | nindent 2 }}
{{- end }}

{{- define "gpumond.image" -}}
{{- with (.Values.global).imageRegistry | default .Values.image.registry }}{{ . }}/{{ end }}
{{- .Values.image.repository }}{{ with .Values.image.digest }}@{{ . }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "gpumond.agentVersion" -}}
{{ .Values.image.digest | default .Values.image.tag | default .Chart.AppVersion | replace ":" "-" }}
{{- end }}

{{- define "gpumond.config" -}}
{{- $access := dict }}
{{- if not .Values.basicAuth.users }}{{ $_ := set $access "insecure" true }}{{ end }}
{{- if .Values.tls.existingSecret }}{{ $_ := set $access "web_config" "/etc/gpumond-web/web.yml" }}{{ end }}
{{- if .Values.access }}{{ $_ := set $access "tokens_file" "/etc/gpumond-web/tokens" }}{{ end }}
{{- if .Values.tokens.existingSecret }}{{ $_ := set $access "tokens_file" (printf "/etc/gpumond-tokens/%s" .Values.tokens.key) }}{{ end }}
{{- if .Values.tokenReview.audience }}{{ $_ := set $access "token_review_audience" .Values.tokenReview.audience }}{{ end }}
{{- toYaml (merge $access .Values.config) }}
{{- end }}

{{- define "gpumond.scheme" -}}
{{ if .Values.tls.existingSecret }}https{{ else }}http{{ end }}
{{- end }}

{{- define "gpumond.probe" -}}
httpGet: {path: /-/healthy, port: metrics, scheme: {{ include "gpumond.scheme" . | upper }}}
{{- end }}

{{- define "gpumond.securityContext" -}}
runAsUser: {{ .Values.runAsUser }}
runAsGroup: {{ .Values.runAsUser }}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "gpumond.affinity" -}}
{{- if .Values.affinity }}
{{- toYaml .Values.affinity }}
{{- else if .Values.gpuNodeLabels }}
nodeAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    nodeSelectorTerms:
      {{- range .Values.gpuNodeLabels }}
      - matchExpressions: [{key: {{ . | quote }}, operator: Exists}]
      {{- end }}
{{- end }}
{{- end }}

{{- define "gpumond.monitorMetadata" -}}
name: {{ include "gpumond.name" .root }}
namespace: {{ .monitor.namespace | default (include "gpumond.namespace" .root) }}
labels:
  {{- include "gpumond.labels" .root | nindent 2 }}
  {{- with .monitor.additionalLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "gpumond.monitorSpec" -}}
jobLabel: {{ .monitor.jobLabel }}
{{- with .monitor.namespace }}
namespaceSelector: {matchNames: [{{ include "gpumond.namespace" $.root }}]}
{{- end }}
{{- with .monitor.sampleLimit }}
sampleLimit: {{ . }}
{{- end }}
selector:
  matchLabels:
    {{- include "gpumond.selector" .root | nindent 4 }}
{{- end }}

{{- define "gpumond.endpoint" -}}
port: metrics
scheme: {{ include "gpumond.scheme" .root }}
interval: {{ .monitor.interval }}
{{- with .monitor.scrapeTimeout }}
scrapeTimeout: {{ . }}
{{- end }}
{{- if .monitor.honorLabels }}
honorLabels: true
{{- end }}
{{- with .monitor.collect }}
params: {"collect[]": {{ toJson . }}}
{{- end }}
{{- with .root.Values.tls }}
{{- if .existingSecret }}
tlsConfig:
  serverName: {{ .serverName | default (printf "%s.%s.svc" (include "gpumond.name" $.root) (include "gpumond.namespace" $.root)) }}
  {{- if .caKey }}
  ca: {secret: {name: {{ .existingSecret }}, key: {{ .caKey }}}}
  {{- end }}
{{- end }}
{{- end }}
{{- with .root.Values.basicAuth.existingSecret }}
basicAuth:
  username: {name: {{ . }}, key: username}
  password: {name: {{ . }}, key: password}
{{- end }}
relabelings:
  - sourceLabels: [__meta_kubernetes_pod_node_name]
    targetLabel: instance
  {{- with .monitor.relabelings }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .monitor.metricRelabelings }}
metricRelabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
