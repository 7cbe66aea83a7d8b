{{/* Labels of everything, and what selects the operator's pods: jobs let these in, so they are not to be chosen. */ -}}
{{- define "inflight.labels" -}}
app.kubernetes.io/name: inflight
app.kubernetes.io/component: operator
{{- end }}

{{/* The operator's image. */ -}}
{{- define "inflight.image" -}}
{{- with .Values.registry }}{{ trimSuffix "/" . }}/{{ end }}
{{- .Values.image.repository }}
{{- if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{/* An environment variable of the operator, from its name, its value and the operator's own default. */ -}}
{{- define "inflight.setting" }}
{{- $value := include "inflight.text" (index . 1) }}
{{- if and $value (ne $value (include "inflight.text" (index . 2))) }}
- name: {{ index . 0 }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}

{{/* A value as the operator reads it. Helm has read numbers as floats and would write large ones as 1e+06. */ -}}
{{- define "inflight.text" }}
{{- if kindIs "map" . }}
{{- . | toJson }}
{{- else if kindIs "slice" . }}
{{- range $i, $entry := . }}{{ if $i }},{{ end }}{{ $entry.name }}{{ end }}
{{- else if kindIs "string" . }}
{{- . }}
{{- else if not (kindIs "invalid" .) }}
{{- . | int64 }}
{{- end }}
{{- end }}
