// SPDX-License-Identifier: GPL-2.0 OR MIT
/* A stand-in for NVIDIA's unified memory module: its device nodes, and its hold on the driver. */
#include <linux/device.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/version.h>

const char *nvidia_standin_version(void);

static int major;
static const char *const names[] = { "nvidia-uvm", "nvidia-uvm-tools" };

static const struct file_operations uvm_ops = { .owner = THIS_MODULE };

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 2, 0)
static char *for_all(struct device *device, umode_t *mode)
#else
static char *for_all(const struct device *device, umode_t *mode)
#endif
{
	if (mode)
		*mode = 0666;
	return NULL;
}

static struct class uvm_class = { .name = "nvidia-uvm", .devnode = for_all };

static int __init uvm_init(void)
{
	int error = class_register(&uvm_class);

	if (error)
		return error;
	major = register_chrdev(0, "nvidia-uvm", &uvm_ops);
	if (major < 0) {
		class_unregister(&uvm_class);
		return major;
	}
	for (unsigned int minor = 0; minor < ARRAY_SIZE(names); minor++)
		device_create(&uvm_class, NULL, MKDEV(major, minor), NULL, "%s", names[minor]);
	pr_info("nvidia-uvm: stand-in %s, major device number %d\n", nvidia_standin_version(), major);
	return 0;
}

static void __exit uvm_exit(void)
{
	for (unsigned int minor = 0; minor < ARRAY_SIZE(names); minor++)
		device_destroy(&uvm_class, MKDEV(major, minor));
	unregister_chrdev(major, "nvidia-uvm");
	class_unregister(&uvm_class);
}

module_init(uvm_init);
module_exit(uvm_exit);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_VERSION(STANDIN_VERSION);
MODULE_DESCRIPTION("Stand-in for NVIDIA's unified memory module (gpunodes lab)");
