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

{{- define "gpumond.image" -}}
{{ .Values.image.repository }}{{ with .Values.image.digest }}@{{ . }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "gpumond.agentVersion" -}}
{{ .Values.image.digest | default .Values.image.tag | default .Chart.AppVersion | replace ":" "-" }}
{{- end }}

{{- define "gpumond.config" -}}
{{- $access := dict }}
{{- if not .Values.basicAuth.users }}{{ $_ := set $access "insecure" true }}{{ end }}
{{- if .Values.tls.secretName }}{{ $_ := set $access "web_config" "/etc/gpumond-web/web.yml" }}{{ end }}
{{- if .Values.access }}{{ $_ := set $access "tokens_file" "/etc/gpumond-web/tokens" }}{{ end }}
{{- if .Values.tokenReview.audience }}{{ $_ := set $access "token_review_audience" .Values.tokenReview.audience }}{{ end }}
{{- toYaml (merge $access .Values.config) }}
{{- end }}

{{- define "gpumond.scheme" -}}
{{ if .Values.tls.secretName }}https{{ else }}http{{ end }}
{{- end }}

{{- define "gpumond.probe" -}}
httpGet: {path: /-/healthy, port: metrics, scheme: {{ include "gpumond.scheme" . | upper }}}
{{- end }}

{{- define "gpumond.endpoint" -}}
port: metrics
scheme: {{ include "gpumond.scheme" . }}
{{- with .Values.tls }}
{{- if .secretName }}
tlsConfig:
  serverName: {{ .serverName | default (printf "%s.%s.svc" (include "gpumond.name" $) $.Release.Namespace) }}
  {{- if .caKey }}
  ca: {secret: {name: {{ .secretName }}, key: {{ .caKey }}}}
  {{- end }}
{{- end }}
{{- end }}
{{- with .Values.basicAuth.secretName }}
basicAuth:
  username: {name: {{ . }}, key: username}
  password: {name: {{ . }}, key: password}
{{- end }}
relabelings:
  - sourceLabels: [__meta_kubernetes_pod_node_name]
    targetLabel: instance
{{- end }}
