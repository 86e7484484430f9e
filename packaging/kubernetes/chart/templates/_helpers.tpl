{{- define "labels" -}}
app.kubernetes.io/name: fusermount3-broker
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "controllerLabels" -}}
app.kubernetes.io/name: fusermount3-controller
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "image" -}}
image: {{ printf "%s:%s" .image.repository (.image.tag | default .default) | quote }}
{{- with .policy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}

{{- define "unprivileged" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* Where the broker exports its metrics: nobody outside of the pod can connect to it. */}}
{{- define "endpoint" -}}
127.0.0.1:9467
{{- end }}
