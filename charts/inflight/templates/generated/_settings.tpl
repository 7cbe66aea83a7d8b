{{/* Made by `python -m inflight_operator.install` from operator/inflight_operator/install: change that, then run it again. */ -}}
{{- define "inflight.settings" }}
{{- include "inflight.setting" (list "INFLIGHT_REGISTRY" .Values.registry "") }}
{{- include "inflight.setting" (list "INFLIGHT_RUN_AS" .Values.runAs 10001) }}
{{- include "inflight.setting" (list "INFLIGHT_WORKERS" .Values.settings.workers 8) }}
{{- include "inflight.setting" (list "INFLIGHT_LOG_LEVEL" .Values.settings.logLevel "INFO") }}
{{- include "inflight.setting" (list "INFLIGHT_LOG_FORMAT" .Values.settings.logFormat "json") }}
{{- include "inflight.setting" (list "INFLIGHT_COORDINATOR_IMAGE" .Values.settings.coordinatorImage "") }}
{{- include "inflight.setting" (list "INFLIGHT_INFERENCE_IMAGE" .Values.settings.inferenceImage "") }}
{{- include "inflight.setting" (list "INFLIGHT_ACTOR_IMAGE" .Values.settings.actorImage "") }}
{{- include "inflight.setting" (list "INFLIGHT_TRAINER_IMAGE" .Values.settings.trainerImage "") }}
{{- include "inflight.setting" (list "INFLIGHT_IMAGE_PULL_SECRETS" .Values.settings.imagePullSecrets list) }}
{{- include "inflight.setting" (list "INFLIGHT_SCRAPE_FROM" .Values.settings.scrapeFrom dict) }}
{{- include "inflight.setting" (list "INFLIGHT_STORAGE_CLASS" .Values.settings.storageClass "") }}
{{- include "inflight.setting" (list "INFLIGHT_MODEL_STORAGE" .Values.settings.modelStorage "100Gi") }}
{{- include "inflight.setting" (list "INFLIGHT_MODEL_ACCESS_MODE" .Values.settings.modelAccessMode "ReadWriteMany") }}
{{- include "inflight.setting" (list "INFLIGHT_GPU_RESOURCE" .Values.settings.gpuResource "nvidia.com/gpu") }}
{{- include "inflight.setting" (list "INFLIGHT_SHM_SIZE" .Values.settings.shmSize "8Gi") }}
{{- include "inflight.setting" (list "INFLIGHT_COORDINATOR_STARTUP_S" .Values.settings.coordinatorStartupSeconds 300) }}
{{- include "inflight.setting" (list "INFLIGHT_INFERENCE_STARTUP_S" .Values.settings.inferenceStartupSeconds 2700) }}
{{- include "inflight.setting" (list "INFLIGHT_ACTOR_STARTUP_S" .Values.settings.actorStartupSeconds 900) }}
{{- end }}
